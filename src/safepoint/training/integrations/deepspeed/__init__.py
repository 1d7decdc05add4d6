"""Loads a checkpoint of DeepSpeed's ZeRO under another number of ranks or another stage.

`partitions` reads the files that the ranks wrote. `universal` writes their content in DeepSpeed's universal layout.
`loading` makes DeepSpeed load this layout, and adds what DeepSpeed leaves out. DeepSpeed communicates with other
ranks, these modules do not. See docs/adr/0013.
"""
