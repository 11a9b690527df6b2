"""A script as people write them for DeepSpeed, after its public examples; one import is changed.

Run by test_compat.py. All that is particular to the test is at its end.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
import zero_deepspeed as deepspeed  # was: import deepspeed
from torch import nn
from torch.utils.data import TensorDataset
from zero_deepspeed.accelerator import get_accelerator


class Net(nn.Module):
    """Convolutions and layers, as for CIFAR-10, but tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc1 = nn.Linear(4 * 3 * 3, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def images(num_samples: int = 24) -> TensorDataset:
    """Pictures of noise, each with a label."""
    generator = torch.Generator().manual_seed(7)
    pictures = torch.randn(num_samples, 3, 8, 8, generator=generator)
    return TensorDataset(pictures, torch.randint(10, (num_samples,), generator=generator))


def main(args: argparse.Namespace) -> None:
    """Train, and write down how it went."""
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    dataset = images()
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    else:
        deepspeed.comm.barrier()

    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=dataset
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = torch.bfloat16 if model_engine.bfloat16_enabled() else torch.float32

    criterion = nn.CrossEntropyLoss()
    losses, norms = [], []
    for _ in range(2):
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            outputs = model_engine(inputs.to(target_dtype))
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            if model_engine.is_gradient_accumulation_boundary():
                norms.append(deepspeed.utils.safe_get_full_grad(net.fc1.weight).norm().item())
            model_engine.step()
            losses.append(loss.item())

    weight = deepspeed.utils.safe_get_full_fp32_param(net.fc2.weight)
    with deepspeed.zero.GatheredParameters(net.fc2.weight, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            net.fc2.weight.data.mul_(0.5)
    halved = deepspeed.utils.safe_get_full_fp32_param(net.fc2.weight)
    assert torch.equal(halved, weight * 0.5)
    model_engine.eval()
    with deepspeed.zero.unwrap_model_for_generation(model_engine) as model, torch.no_grad():
        predictions = model(dataset.tensors[0].to(local_device)).argmax(-1)
    assert predictions.shape == dataset.tensors[1].shape
    model_engine.destroy()

    rank = deepspeed.comm.get_rank()
    report = {
        "losses": losses,
        "norms": norms,
        "lr": optimizer.param_groups[0]["lr"],
        "steps": model_engine.global_steps,
        "weight": weight.tolist(),
    }
    args.out.with_suffix(f".{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    main(deepspeed.add_config_arguments(parser).parse_args())
