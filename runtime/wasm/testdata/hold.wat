;; Takes as many MiB of memory as its last argument says ("80"), writing to
;; every page, prints "held" and then sleeps for ever.
(module
  (import "wasi_snapshot_preview1" "args_get" (func $args (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_sizes_get" (func $sizes (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 200) "held\n")
  (func $_start (export "_start") (local $p i32) (local $n i32) (local $c i32) (local $at i32) (local $end i32)
    (drop (call $sizes (i32.const 0) (i32.const 4)))
    (drop (call $args (i32.const 1024) (i32.const 4096)))
    ;; the last of argc pointers
    (local.set $p (i32.load (i32.add (i32.const 1024) (i32.mul (i32.sub (i32.load (i32.const 0)) (i32.const 1)) (i32.const 4)))))
    (block $done
      (loop $digit
        (local.set $c (i32.sub (i32.load8_u (local.get $p)) (i32.const 48)))
        (br_if $done (i32.gt_u (local.get $c) (i32.const 9)))
        (local.set $n (i32.add (i32.mul (local.get $n) (i32.const 10)) (local.get $c)))
        (local.set $p (i32.add (local.get $p) (i32.const 1)))
        (br $digit)))
    (local.set $at (i32.const 65536))
    (local.set $end (i32.add (i32.const 65536) (i32.mul (local.get $n) (i32.const 1048576))))
    (drop (memory.grow (i32.mul (local.get $n) (i32.const 16))))
    (block $full
      (loop $page
        (br_if $full (i32.ge_u (local.get $at) (local.get $end)))
        (i32.store (local.get $at) (i32.const 1))
        (local.set $at (i32.add (local.get $at) (i32.const 4096)))
        (br $page)))
    (i32.store (i32.const 100) (i32.const 200))
    (i32.store (i32.const 104) (i32.const 5))
    (drop (call $write (i32.const 1) (i32.const 100) (i32.const 1) (i32.const 108)))
    ;; one clock subscription (tag 0): monotonic, an hour
    (i32.store (i32.const 320) (i32.const 1))
    (i64.store (i32.const 328) (i64.const 3600000000000))
    (loop $l
      (drop (call $poll (i32.const 304) (i32.const 400) (i32.const 1) (i32.const 500)))
      (br $l))))
