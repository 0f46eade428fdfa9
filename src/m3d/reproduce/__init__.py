"""The paper, reproduced: every table and figure as a declarative plan of cells, one runner, one renderer.

``cells`` says what a plan is made of, ``plans`` lists them, ``cost`` estimates them; ``runner`` makes the cells that
are missing (``work`` is what one of them takes), ``records`` keeps what came out, ``tables`` and ``figures`` show it
beside the published values. Only ``work``, ``moments`` and ``toy`` compute with PyTorch: what is shown needs the
records alone.
"""
