"""Formula for the bytes of an offloaded optimizer, by place; its memory equals it."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from zero_offload.errors import BudgetError

from .subgroups import Residence, SubGroup
from .swap_window import slots_of


@frozen(kw_only=True)
class Footprint:
    """Bytes by purpose and place. Small things are not counted: step counts, Python's objects.

    Attributes:
        resident_bytes: State that is kept on the host.
        slot_bytes: Host memory through which state passes on its way from and to the disk.
        gradient_bytes: Host memory for gradients that have left their device.
        staging_bytes: Host memory through which parameters pass during a step.
        device_bytes: State that is kept on the parameters' devices.
        disk_bytes: State that is kept on the disk.
    """

    resident_bytes: int = field(default=0)
    slot_bytes: int = field(default=0)
    gradient_bytes: int = field(default=0)
    staging_bytes: int = field(default=0)
    device_bytes: int = field(default=0)
    disk_bytes: int = field(default=0)

    @classmethod
    def of(
        cls, groups: Iterable[SubGroup], *, gradient_bytes: int, staging_bytes: int
    ) -> Footprint:
        """Return the footprint of these sub-groups."""
        sizes = {where: [] for where in Residence}
        for group in groups:
            sizes[group.residence].append(group.nbytes)
        return cls(
            resident_bytes=sum(sizes[Residence.HOST]),
            slot_bytes=sum(slots_of(sizes[Residence.DISK])),
            gradient_bytes=gradient_bytes,
            staging_bytes=staging_bytes,
            device_bytes=sum(sizes[Residence.DEVICE]),
            disk_bytes=sum(sizes[Residence.DISK]),
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for all purposes."""
        return self.resident_bytes + self.slot_bytes + self.gradient_bytes + self.staging_bytes

    def check(self, budget_bytes: int | None) -> None:
        """Raise if the optimizer needs more host memory than it may allocate.

        Raises:
            BudgetError: Too much is needed; with the bytes by purpose, and settings that need less.
        """
        if budget_bytes is None or self.host_bytes <= budget_bytes:
            return
        held = {
            "state on the host": self.resident_bytes,
            "slots for state on its way from and to the disk": self.slot_bytes,
            "gradients": self.gradient_bytes,
            "parameters being staged": self.staging_bytes,
        }
        lines = "".join(f"\n  {nbytes:>15,}  {name}" for name, nbytes in held.items() if nbytes)
        raise BudgetError(
            f"OffloadedOptimizer may allocate budget_bytes={budget_bytes:,} of host memory and "
            f"needs {self.host_bytes:,}:{lines}\nOffload more to disk (state='disk', a smaller "
            f"fraction['host']), pass smaller subgroup_bytes, or grads='device'.",
            nbytes=self.host_bytes,
            held=held,
        )
