"""Makes timm, in the folder that the script is given, importable beside the CPU build of torch.

timm imports torchvision, which describes two of its compiled operators when it is imported, but
cannot load them beside that build: so torch must know their names. timm uses neither.
"""

import sys

import torch

sys.path.append(sys.argv[1])
_declared = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
