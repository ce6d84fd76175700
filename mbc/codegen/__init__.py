"""Code generation: from a plan to flat rows, to sources, to a compiled package.

* `view`: a plan as flat rows, one for each launch
* `launch_headers`: headers with the integers of launches, from their declarations in Python
* `render_sources`: source files of a package, from templates
* `build`: writes a package, whole or not at all
* `staging`: the temporary folder in which a package is written
* `objects`: compiles sources to objects and links a shared library
* `cache`: compiled objects, kept from one build to the next
* `toolchain`: finds nvcc, the C++ compiler, headers and libraries
"""
