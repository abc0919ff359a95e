"""A run that begins with trained weights: where they come from, which of them fit, and what of the network learns.

Weights are safetensors: tensors and no code. The head is the last linear layer with as many outputs as there are
classes; weights of another number of classes give the network everything but the head. All else must fit by name and
shape.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from megabatch.config.model import ModelConfig
from megabatch.errors import ConfigError, first_line
from megabatch.foreign import import_foreign
from megabatch.model.weights import read_weights

_EXTRA = "pip install 'megabatch[timm]'"


def prepare_pretrained(
    network: nn.Module, settings: ModelConfig, num_classes: int
) -> tuple[list[str], nn.Module | None]:
    """Load and freeze as the settings ask; returns lines to be said, and the head where one was needed.

    Raises:
        ConfigError: weights that cannot be had or do not fit, a network without a head.
        CheckpointError: a file that cannot be read.
    """
    if not settings.pretrained and not settings.freeze_backbone and settings.backbone_lr_factor == 1.0:
        return [], None
    head, lines = head_of(network, num_classes), []
    if settings.pretrained:
        lines.append(load_pretrained(network, head, _weights_of(settings), settings.pretrained))
    if settings.freeze_backbone:
        network.requires_grad_(False)
        head.requires_grad_(True)
        count = sum(p.numel() for p in network.parameters() if p.requires_grad)
        lines.append(f"frozen         all but the head: {count:,} parameters are trained")
    elif settings.backbone_lr_factor != 1.0:
        lines.append(f"learning rate  times {settings.backbone_lr_factor:g} for all but the head")
    return lines, head


def head_of(network: nn.Module, num_classes: int) -> nn.Linear:
    """The last linear layer whose outputs are the classes."""
    heads = [m for m in network.modules() if isinstance(m, nn.Linear) and m.out_features == num_classes]
    if not heads:
        raise ConfigError(
            f"the network has no linear layer with {num_classes} outputs, which would be its head; train it whole: "
            "without model.pretrained, model.freeze_backbone and model.backbone_lr_factor"
        )
    return heads[-1]


def load_pretrained(network: nn.Module, head: nn.Module, weights: dict[str, Tensor], source: str) -> str:
    """Give the network what fits, and return a line that says so.

    Raises:
        ConfigError: anything but the head is missing or of another shape.
    """
    own = network.state_dict()
    name_of = {id(module): name for name, module in network.named_modules()}[id(head)]
    of_head = {f"{name_of}.{key}" for key in head.state_dict()}
    fits = {name: value for name, value in weights.items() if name in own and value.shape == own[name].shape}
    wrong = [name for name in own if name not in fits and name not in of_head and not name.endswith("_tracked")]
    if wrong:
        there = f"of shape {tuple(weights[wrong[0]].shape)}" if wrong[0] in weights else "not there"
        raise ConfigError(
            f"model.pretrained {source} holds another network: {wrong[0]} is {there}, needed "
            f"{tuple(own[wrong[0]].shape)} (and {len(wrong) - 1} more); give weights of the network model.name"
        )
    replaced = not of_head <= fits.keys()
    kept = {name: value for name, value in fits.items() if not (replaced and name in of_head)}
    network.load_state_dict(kept, strict=False)
    line = f"pretrained     {source}: {len(kept)} of {len(own)} tensors"
    return line + (f"; the head is new, for {len(own[f'{name_of}.weight'])} classes" if replaced else ", head included")


def _weights_of(settings: ModelConfig) -> dict[str, Tensor]:
    source, name = settings.pretrained, settings.name.removeprefix("timm:")
    if source == "timm":
        timm = import_foreign(f"model.pretrained {source}", "timm", _EXTRA)
        try:
            state: dict[str, Tensor] = timm.create_model(name, pretrained=True).state_dict()
        except Exception as error:  # whatever the network, the hub or the model raises
            raise ConfigError(f"timm has no weights of '{name}' ({first_line(error)}); give a file") from error
        return state
    if source.startswith("hub:"):
        hub = import_foreign(f"model.pretrained {source}", "huggingface_hub", _EXTRA)
        try:
            path = hub.hf_hub_download(source.removeprefix("hub:"), "model.safetensors")
        except Exception as error:
            raise ConfigError(
                f"model.pretrained {source} cannot be had ({first_line(error)}); check the name and the network, "
                "or give a file"
            ) from error
        return read_weights(Path(path))
    if not Path(source).is_file():
        raise ConfigError(f"model.pretrained '{source}' does not exist; give a file of weights")
    return read_weights(Path(source))
