"""Trainers that nnU-Net finds by name when `nnUNet_extTrainer` names this folder.

* `mbc_trainers`: nnU-Net's trainer and its benchmark, with steps of mbc
"""
