"""The storage figures that Red Hat publishes: tables 6.1 and 6.2, and the sums of section 6.5.3.

Source: "Configuring model checkpointing for distributed training with Kubeflow Trainer V2", Red Hat OpenShift AI 3.4,
chapter 6.5. The figures are in GB as the documents print them; the documents do not say whether a GB is 10^9 or 2^30
bytes. docs/planning.md says where Safepoint's own figures differ, and why.
"""

from typing import NamedTuple

from safepoint.estimates.sizes import Strategy

UPLOAD_BYTES_PER_S = 68e6
"""Section 6.5: "479 MB/s download and 68 MB/s upload", measured for FSDP, the fastest of the three strategies in
the documents (DDP, FSDP, DeepSpeed)."""
DOWNLOAD_BYTES_PER_S = 479e6


class Breakdown(NamedTuple):
    """A column of table 6.2, and the sum of section 6.5.3 for this column. All figures are GB.

    Args:
        name: the column.
        strategy: the strategy.
        base_cache: the model's download.
        checkpoint_download: the download of a checkpoint at a resume.
        kept: the number of kept checkpoints (save_total_limit) in the sum; N in the formula.
        checkpoint: the size of one checkpoint in the sum.
        local_checkpoints: the local checkpoints in the table.
        consolidation_peak: the additional space while a checkpoint is saved.
        final_model: the finished model.
        safety_buffer: the buffer in the table.
        sum_buffer: the buffer in the sum.
        sum_download: the download of a checkpoint in the sum; the sum for ZeRO-3 leaves it out.
        stated_sum: the sum that the documents print.
        observed_peak: the peak in table 6.1.
    """

    name: str
    strategy: Strategy
    base_cache: float
    checkpoint_download: float
    kept: int
    checkpoint: float
    local_checkpoints: float
    consolidation_peak: float
    final_model: float
    safety_buffer: float
    sum_buffer: float
    sum_download: float
    stated_sum: float
    observed_peak: float

    @property
    def sum(self) -> float:
        """The formula: base_cache + checkpoint_download + N x checkpoint_size + peak + final_model + buffer."""
        return (
            self.base_cache
            + self.sum_download
            + self.kept * self.checkpoint
            + self.consolidation_peak
            + self.final_model
            + self.sum_buffer
        )

    @property
    def multiplier(self) -> float:
        """Section 6.5.4: the consolidation peak, as a multiple of the size of a checkpoint."""
        return self.consolidation_peak / self.checkpoint


DDP_8B = Breakdown(
    name="DDP (8B)",
    strategy=Strategy.DDP,
    base_cache=25,
    checkpoint_download=45,
    kept=2,
    checkpoint=45,
    local_checkpoints=90,
    consolidation_peak=90,
    final_model=15,
    safety_buffer=10,
    sum_buffer=10,
    sum_download=45,
    stated_sum=275,
    observed_peak=200,
)
FSDP_7B = Breakdown(
    name="FSDP (7B)",
    strategy=Strategy.FSDP,
    base_cache=23,
    checkpoint_download=21,
    kept=4,
    checkpoint=21,
    local_checkpoints=84,
    consolidation_peak=42,
    final_model=21,
    safety_buffer=10.7,
    sum_buffer=9,
    sum_download=21,
    stated_sum=200,
    observed_peak=200,
)
ZERO3_70B_LORA = Breakdown(
    name="DeepSpeed (70B LoRA)",
    strategy=Strategy.ZERO3,
    base_cache=6,
    checkpoint_download=2.4,
    kept=10,
    checkpoint=1.6,
    local_checkpoints=16,
    consolidation_peak=68,
    final_model=67,
    safety_buffer=11,
    sum_buffer=11,
    sum_download=0,
    stated_sum=168,
    observed_peak=150,
)
TABLE_6_2 = (DDP_8B, FSDP_7B, ZERO3_70B_LORA)


def documented_multiplier(strategy: Strategy, *, has_adapter: bool) -> float:
    """The consolidation peak in the documents, as a multiple of the size of a checkpoint.

    The documents have 42.5 for ZeRO-3 with LoRA, and 2 for DDP and FSDP. For other strategies they have no figure; 2
    is used.
    """
    return ZERO3_70B_LORA.multiplier if strategy is Strategy.ZERO3 and has_adapter else DDP_8B.multiplier
