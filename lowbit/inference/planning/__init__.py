"""Plans: a scheme for each weight, by what each costs on this machine and what the model loses by it."""

from lowbit.inference.planning.call import autoquant

__all__ = ["autoquant"]
