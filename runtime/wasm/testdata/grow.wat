;; Takes memory up to 4 GiB, writing to every page, and exits with code 9
;; when it gets no more.
(module
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
  (func $_start (export "_start") (local $at i32)
    (loop $l
      (local.set $at (memory.grow (i32.const 1)))
      (if (i32.eq (local.get $at) (i32.const -1)) (then (call $exit (i32.const 9))))
      (local.set $at (i32.mul (local.get $at) (i32.const 65536)))
      (i32.store (local.get $at) (i32.const 1))
      (i32.store offset=4096 (local.get $at) (i32.const 1))
      (i32.store offset=8192 (local.get $at) (i32.const 1))
      (i32.store offset=16384 (local.get $at) (i32.const 1))
      (i32.store offset=32768 (local.get $at) (i32.const 1))
      (i32.store offset=61440 (local.get $at) (i32.const 1))
      (br $l))))
