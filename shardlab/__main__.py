# PYTHON_ARGCOMPLETE_OK
"""The command `shardlab`, where it is not installed: `python -m shardlab run -n 8 pretrain_gpt ...`."""
from shardlab.command import main

if __name__ == "__main__":
    main()
