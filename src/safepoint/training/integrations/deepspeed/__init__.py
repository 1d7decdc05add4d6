"""DeepSpeed's ZeRO: loading a checkpoint under another number of ranks or another stage.

`partitions` reads what the ranks wrote. `universal` writes it in DeepSpeed's universal layout. `loading` makes
DeepSpeed load this layout, and adds what DeepSpeed leaves out. No module communicates with other ranks. See
docs/adr/0013.
"""
