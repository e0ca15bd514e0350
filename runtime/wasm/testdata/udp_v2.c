/* A name and a datagram by the second form of the socket calls: names that end
   in _v2, addresses of 128 bytes that begin with their family, a port beside
   the sender's address. argv: name, port. Prints what came back, and from
   where. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IMPORT(name) __attribute__((import_module("wasi_snapshot_preview1"), import_name(name)))

struct address { uint8_t *buf; uint32_t size; };
struct iovec_in { const void *buf; uint32_t len; };
struct iovec_out { void *buf; uint32_t len; };
struct sockaddr_out { uint8_t family; uint32_t data_len; uint8_t *data; };
struct addrinfo_out {
	uint16_t flags;
	uint8_t family, kind, protocol;
	uint32_t addr_len;
	struct sockaddr_out *addr;
	char *canon;
	uint32_t canon_len;
	struct addrinfo_out *next;
};

IMPORT("sock_open_v2") uint32_t sock_open(uint32_t family, uint32_t kind, uint32_t *fd);
IMPORT("sock_send_to_v2") uint32_t sock_send_to(uint32_t fd, const struct iovec_in *v, uint32_t n, struct address *to, uint32_t port, uint32_t flags, uint32_t *sent);
IMPORT("sock_recv_from_v2") uint32_t sock_recv_from(uint32_t fd, const struct iovec_out *v, uint32_t n, struct address *from, uint32_t flags, uint32_t *port, uint32_t *got, uint32_t *oflags);
IMPORT("sock_getlocaladdr_v2") uint32_t sock_getlocaladdr(uint32_t fd, struct address *a, uint32_t *port);
IMPORT("sock_getaddrinfo") uint32_t sock_getaddrinfo(const char *node, uint32_t node_len, const char *service, uint32_t service_len,
	const struct addrinfo_out *hint, struct addrinfo_out **result, uint32_t most, uint32_t *count);

static uint32_t must(uint32_t e, const char *what) {
	if (e) { printf("%s: %u\n", what, e); exit(1); }
	return 0;
}

int main(int argc, char **argv) {
	uint8_t data[26], to[128] = {0}, from[128] = {0}, own[128] = {0};
	char canon[32];
	struct sockaddr_out sa = {0, sizeof data, data};
	struct addrinfo_out info = {.addr_len = sizeof data, .addr = &sa, .canon = canon, .canon_len = sizeof canon}, hint = {.kind = 1}, *list = &info;
	uint32_t count = 0, fd, n, port = 0, oflags, ownport = 0;
	if (argc < 3) return 2;
	must(sock_getaddrinfo(argv[1], strlen(argv[1]), argv[2], strlen(argv[2]), &hint, &list, 1, &count), "getaddrinfo");
	if (count < 1 || info.family != 1) { printf("%u addresses, family %u\n", count, info.family); return 1; }
	to[0] = 1;
	memcpy(to + 2, data + 2, 4); /* behind the port */
	must(sock_open(1, 1, &fd), "open");
	struct address a = {to, sizeof to}, f = {from, sizeof from}, l = {own, sizeof own};
	struct iovec_in out = {"ping", 4};
	must(sock_send_to(fd, &out, 1, &a, (uint32_t)atoi(argv[2]), 0, &n), "send_to");
	char buf[64] = {0};
	struct iovec_out in = {buf, sizeof buf - 1};
	must(sock_recv_from(fd, &in, 1, &f, 0, &port, &n, &oflags), "recv_from");
	must(sock_getlocaladdr(fd, &l, &ownport), "getlocaladdr");
	printf("%.*s from family %u %u.%u.%u.%u port %u, own family %u port %s\n", (int)n, buf, from[0], from[2], from[3], from[4], from[5], port, own[0], ownport ? "set" : "none");
	uint8_t other[128] = {1, 0, 192, 0, 2, 1};
	struct address o = {other, sizeof other};
	printf("elsewhere: %u\n", sock_send_to(fd, &out, 1, &o, 53, 0, &n));
	return 0;
}
