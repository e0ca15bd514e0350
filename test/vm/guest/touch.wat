;; Takes memory up to 4 GiB and writes to every byte of it; exits with code 9
;; when it gets no more.
(module
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
  (func $_start (export "_start") (local $at i32)
    (loop $l
      (local.set $at (memory.grow (i32.const 1)))
      (if (i32.eq (local.get $at) (i32.const -1)) (then (call $exit (i32.const 9))))
      (memory.fill (i32.mul (local.get $at) (i32.const 65536)) (i32.const 7) (i32.const 65536))
      (br $l))))
