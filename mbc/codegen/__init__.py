"""Plan -> package: flat rows of a plan, the sources made of them, and the compilers that build those."""
