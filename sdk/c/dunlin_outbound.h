/* Connections out of a C guest (wasm32-wasi), to what the pod's annotation
 * dunlin.dev/outbound allows. WASI preview 1 has no connect; the descriptor
 * that dunlin_dial returns works with read, write, poll, fcntl and close. */
#ifndef DUNLIN_OUTBOUND_H
#define DUNLIN_OUTBOUND_H

#ifdef __cplusplus
extern "C" {
#endif

/* dunlin_dial connects over TCP to a host (a name or an address) and port, and
 * waits until the connection is there, at most timeout_ms milliseconds (0: as
 * long as the system tries). It returns a descriptor in blocking mode, or the
 * negative errno of wasi-libc: -EACCES is what the annotation does not allow
 * (the pod's log says what it lacks), -ENOENT a name that does not exist,
 * -EAGAIN that no DNS server answers. */
int dunlin_dial(const char *host, unsigned short port, int timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
