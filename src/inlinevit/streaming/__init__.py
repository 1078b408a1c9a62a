"""Images of any size through a model as a whole, in bounded memory, with the result of the plain forward pass."""
