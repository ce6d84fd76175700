"""Files of other frameworks: imports models as sources and weights, and exports trained weights.

* `program`: an exported program as plain data
* `pt2`: reads files of torch.export, without PyTorch
* `pt2_source_lines`: the lines of a model that an operation of such a file comes from
* `aten`: rules that translate ATen operations into the language, one file for each family
* `from_onnx`: reads an ONNX file as such a program
* `grad_regions`: replaces regions such as `torch.no_grad()` by their operations
* `functionalize`: replaces writes in place by operations that give new tensors
* `translate`: translates a program to steps, and collects all refusals
* `builder`: the network that rules write steps into
* `finish`: simplifies and renumbers the steps of a whole network
* `refusal`: one message with all operations that cannot be translated
* `steps`: layers and operators, before they have blocks and names
* `modules`: the tree of module calls of the steps
* `blocks`: repeated groups of steps, with parameters for their differences
* `source_names`: unused names
* `write`: writes the text of the source
* `state_dict`: a `state_dict` as a file to train from, and back
* `to_onnx`: exports a trained network as an ONNX model
* `check`: compares an imported network, in float64, with its model
* `importing`: the whole import
"""
