"""How kernels are compiled, cached, launched and registered."""
