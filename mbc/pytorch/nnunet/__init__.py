"""nnU-Net's training with plans of mbc.

* `loss_terms`: nnU-Net's loss as a loss of the language, and its numbers in validation
* `training_memory`: the memory of a training's process, between a plan and PyTorch
* `check_inputs`: plans, checkpoints and data sets that cannot be trained, said before training starts
* `planned_training`: the parts of a trainer that run mbc's programs
* `trainers`: the trainers that nnU-Net finds by name
"""

from pathlib import Path

TRAINERS = Path(__file__).parent / "trainers"  # the folder for nnU-Net's variable nnUNet_extTrainer
