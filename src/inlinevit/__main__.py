"""`python -m inlinevit` and `torchrun -m inlinevit` do what `inlinevit` does."""

from .cli import main

if __name__ == "__main__":
    main()
