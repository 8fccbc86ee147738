#!/bin/bash
# One session of measurements: decode_trial.sh FOLDER. Prepares in twenty-five processes, times one after another, then the host.
out=$1; turns=$(mktemp -d); mkdir -p "$out"; export OMP_NUM_THREADS=1
ready() { touch "$turns/ready-$1"; }
for i in $(seq 0 22); do
  timeout 105 python -m tools.record.decode_trial --fa3 "$FLASH_ATTENTION_3_LIBRARY" --part $i/23 --processes 25 \
    --turns "$turns" --prepare 62 --out "$out/trial-$i.json" >"$out/trial-$i.log" 2>&1 &
done
(timeout 60 python -m pytest -q -n 0 -p no:cacheprovider -k "compiled_whole or captured_merge or first_causal" \
   tests/utils/attention/test_decode_gpu.py tests/utils/attention/test_gluon_gpu.py >"$out/tests.log" 2>&1; ready tests) &
(timeout 60 python -m tools.record.decode_right --cases 400 --seconds 40 --first 7000 --out "$out/right.json" >"$out/right.log" 2>&1; ready right) &
wait
timeout 40 python -m tools.record.decode host --out "$out/host.json" >"$out/host.log" 2>&1
rm -rf "$turns"
