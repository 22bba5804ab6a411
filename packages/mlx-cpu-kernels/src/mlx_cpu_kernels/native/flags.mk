# Flags of the compiler: build.py takes them for what users get, Makefile for what is tested.
FLAGS = -std=c++20 -O3 -fPIC -fvisibility=hidden -fno-strict-aliasing -fno-math-errno -fno-trapping-math -DNDEBUG

# Instruction sets of each kind of processor, and the flags of sources whose name begins with one of them.
SETS_x86_64 = avx2 avx512 amx
SETS_aarch64 = neon
FLAGS_avx2 = -mavx2 -mfma -mf16c
FLAGS_avx512 = -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512vbmi
FLAGS_amx = -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512vbmi -mamx-tile -mamx-int8
FLAGS_neon =
