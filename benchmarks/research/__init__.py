"""Research passes over the vocabulary that the benchmarks measure. The library does not use them."""
