"""DeepSpeed's ZeRO: loading a checkpoint under another number of ranks or another stage.

`partitions` reads the files that the ranks wrote. `universal` writes their content in DeepSpeed's universal layout.
`loading` makes DeepSpeed load this layout, and adds what DeepSpeed leaves out. Apart from calls of DeepSpeed itself,
no module communicates with other ranks. See docs/adr/0013.
"""
