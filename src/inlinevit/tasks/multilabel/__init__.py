"""Multi-label classification: a CSV file of images and labels, BCE or asymmetric loss, mean average precision."""
