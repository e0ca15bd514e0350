;; Accepts connections one after another on its first listener, in blocking
;; mode, and echoes what it receives until the peer closes. Exits with code 0
;; when the listener is closed.
(module
  (import "wasi_snapshot_preview1" "sock_accept" (func $accept (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_recv" (func $recv (param i32 i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "sock_send" (func $send (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_close" (func $close (param i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\00\01\00\00\00\04\00\00")
  (func $_start (export "_start") (local $fd i32)
    (loop $next
      (if (call $accept (i32.const 3) (i32.const 0) (i32.const 16)) (then (return)))
      (local.set $fd (i32.load (i32.const 16)))
      (block $end
        (loop $more
          (i32.store (i32.const 0) (i32.const 256))
          (i32.store (i32.const 4) (i32.const 1024))
          (br_if $end (call $recv (local.get $fd) (i32.const 0) (i32.const 1) (i32.const 0) (i32.const 20) (i32.const 24)))
          (br_if $end (i32.eqz (i32.load (i32.const 20))))
          (i32.store (i32.const 4) (i32.load (i32.const 20)))
          (br_if $end (call $send (local.get $fd) (i32.const 0) (i32.const 1) (i32.const 0) (i32.const 20)))
          (br $more)))
      (drop (call $close (local.get $fd)))
      (br $next))))
