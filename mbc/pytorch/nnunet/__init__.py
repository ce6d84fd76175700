"""nnU-Net's training with plans of mbc.

* `loss_terms`: nnU-Net's loss as a loss of the language, and its numbers in validation
* `training_memory`: the memory of a training's process, between a plan and PyTorch
* `check_inputs`: plans, checkpoints and data sets that cannot be trained, said before training starts
* `planned_training`: the parts of a trainer that run mbc's programs
* `trainers`: the trainers that nnU-Net finds by name
* `plans_file`: the configurations of a plans file, and the images and labels of a data set
* `network_settings`: the settings of `network.mbc` for a configuration
* `prospects`: predictions of a configuration within a budget
"""

from pathlib import Path

TRAINERS = Path(__file__).parent / "trainers"  # the folder for nnU-Net's variable nnUNet_extTrainer
