#include "dunlin_outbound.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define IMPORT(name) __attribute__((import_module("wasi_snapshot_preview1"), import_name(name)))

struct address {
	const uint8_t *buf;
	uint32_t size;
};

struct sockaddr_out {
	uint8_t family;
	uint32_t data_len;
	uint8_t *data;
};

struct addrinfo_out {
	uint16_t flags;
	uint8_t family, kind, protocol;
	uint32_t addr_len;
	struct sockaddr_out *addr;
	char *canon;
	uint32_t canon_len;
	struct addrinfo_out *next;
};

_Static_assert(sizeof(struct addrinfo_out) == 28 && sizeof(struct sockaddr_out) == 12, "layout of the host's interface");

IMPORT("sock_open") uint32_t sock_open(uint32_t family, uint32_t kind, uint32_t *fd);
IMPORT("sock_connect") uint32_t sock_connect(uint32_t fd, struct address *to, uint32_t port);
IMPORT("sock_setsockopt") uint32_t sock_setsockopt(uint32_t fd, uint32_t level, uint32_t name, const void *value, uint32_t size);
IMPORT("sock_getaddrinfo") uint32_t sock_getaddrinfo(const char *node, uint32_t node_len, const char *service, uint32_t service_len,
	const struct addrinfo_out *hint, struct addrinfo_out **result, uint32_t most, uint32_t *count);

enum { INET4 = 1, STREAM = 2, SEND_TIMEOUT = 12, MOST = 8 };

static int dial_one(const struct addrinfo_out *a, unsigned short port, int timeout_ms) {
	uint32_t fd, e = sock_open(a->family, STREAM, &fd);
	if (e != 0)
		return -(int)e;
	int64_t wait[2] = {timeout_ms / 1000, timeout_ms % 1000 * 1000}, none[2] = {0, 0};
	if (timeout_ms > 0)
		sock_setsockopt(fd, 0, SEND_TIMEOUT, wait, sizeof wait);
	/* Behind the port, and with IPv6 four bytes of flow label. */
	struct address to = {a->addr->data + (a->family == INET4 ? 2 : 6), a->family == INET4 ? 4 : 16};
	e = sock_connect(fd, &to, port);
	if (e != 0) {
		close((int)fd);
		return -(int)e;
	}
	sock_setsockopt(fd, 0, SEND_TIMEOUT, none, sizeof none);
	return (int)fd;
}

int dunlin_dial(const char *host, unsigned short port, int timeout_ms) {
	struct addrinfo_out infos[MOST], hint, *result = infos;
	struct sockaddr_out addrs[MOST];
	uint8_t data[MOST][26];
	memset(infos, 0, sizeof infos);
	memset(addrs, 0, sizeof addrs);
	memset(&hint, 0, sizeof hint);
	hint.kind = STREAM;
	for (int i = 0; i < MOST; i++) {
		addrs[i].data = data[i];
		infos[i].addr = &addrs[i];
		infos[i].next = i + 1 < MOST ? &infos[i + 1] : 0;
	}
	/* The port is for the message of a refusal. */
	char service[6] = "";
	int digits = 0;
	for (unsigned p = port; p > 0; p /= 10)
		digits++;
	for (unsigned p = port; p > 0; p /= 10)
		service[--digits] = (char)('0' + p % 10);
	uint32_t count = 0, e = sock_getaddrinfo(host, strlen(host) + 1, service, strlen(service) + 1, &hint, &result, MOST, &count);
	if (e != 0)
		return -(int)e;
	int last = -ENOENT;
	for (uint32_t i = 0; i < count && i < MOST; i++)
		if ((last = dial_one(&infos[i], port, timeout_ms)) >= 0)
			break;
	return last;
}
