"""Speed, memory and cost, measured side by side."""
