"""Collectives between hosts: network namespaces on one machine, with links of a given speed."""
