"""The kernels of a mixture of experts: the router, and the products of its experts."""
