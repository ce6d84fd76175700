"""Files of other frameworks: a model becomes a source and weights, and trained weights go back.

* `program`: an exported program as plain data
* `pt2`: reads what torch.export wrote, without torch
* `aten`: what each ATen operation is in the language, a family a file
* `from_onnx`: an ONNX file as such a program
* `grad_regions`: regions such as `torch.no_grad()` resolved
* `functionalize`: writes in place become operations that give new tensors
* `builder`: the network under construction, which the rules of operations extend
* `translate`: a program to steps, every refusal remembered
* `finish`: steps when all of them are there
* `refusal`: all that cannot be taken, in one message
* `steps`: layers and operators, before they have blocks and names
* `modules`: the tree of module calls that the steps were made in
* `blocks`: repeated groups of steps, with parameters for what differs
* `source_names`: names that are not taken
* `write`: the text of the source
* `state_dict`: a `state_dict` as a file to train from, and back
* `to_onnx`: a trained network as an ONNX model
* `check`: an imported network in float64, beside numbers of its model
* `importing`: all of the import
"""
