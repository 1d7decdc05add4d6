"""DeepSpeed's ZeRO: a checkpoint of some ranks, loaded by another number of ranks or by another stage.

`partitions` reads what the ranks wrote, `universal` writes it in DeepSpeed's universal layout, `loading` has
DeepSpeed load that, and adds what DeepSpeed leaves out; `frozen` keeps what is below adapters out of checkpoints.
Nothing here speaks to other ranks. See docs/adr/0013.
"""
