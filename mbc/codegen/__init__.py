"""Plan -> package: flat rows of a plan, the sources made of them, and the compilers that build those.

* `view`: a plan as flat rows, one a launch
* `render`: source files of a package, from templates
* `build`: writes a package, whole or not at all
* `place`: the temporary folder in which a package is made
* `objects`: sources to objects to a shared library
* `cache`: compiled objects, kept from one build to the next
* `toolchain`: where nvcc, the C++ compiler, headers and libraries are
"""
