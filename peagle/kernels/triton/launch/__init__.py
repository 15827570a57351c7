"""How kernels are launched: beside the end of the one in front, and compiled ahead."""
