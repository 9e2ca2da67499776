"""Every kernel against a float64 reference and against its floor: `python -m kernels.bench`.

`__main__` runs the cases and prints them, `measure` has the clock and the floors, `setups` the geometries and sizes;
the other files have the cases: `decode`, `prompts`, `layers`, `tower`, `sampling`. tests/kernels/test_bench.py runs
them small.
"""
