"""llama.cpp's own server, as the wheel `xllamacpp` brings it. Prints its address, and runs until it is interrupted.

    python llama_cpp_server.py FILE.gguf THREADS

It runs in an environment of its own, without mlx-ring.
"""

import signal
import sys
from importlib import import_module

CONTEXT = 2048


def main() -> None:
    llama = import_module("xllamacpp")
    path, threads = sys.argv[1], int(sys.argv[2])
    options = llama.CommonParams()
    options.model.path = path
    options.port = 0
    options.n_ctx = CONTEXT
    options.n_parallel = 1
    for pool in (options.cpuparams, options.cpuparams_batch):
        pool.n_threads = threads
    options.cache_prompt = False
    options.cache_ram_mib = 0
    options.ui = False
    server = llama.Server(options)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
