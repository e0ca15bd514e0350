/* A guest that speaks MQTT 3.1.1: it subscribes to a topic, prints what comes,
 * and publishes a reading every second.
 *
 * BROKER is host:port, TOPIC where it publishes (COMMANDS is TOPIC/set). */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "dunlin_outbound.h"

enum { CONNECT = 0x10, CONNACK = 0x20, PUBLISH = 0x30, SUBSCRIBE = 0x82, SUBACK = 0x90, PINGREQ = 0xc0, MOST = 4096 };

static void die(const char *what) {
	fprintf(stderr, "%s\n", what);
	exit(1);
}

static void send_all(int fd, const unsigned char *b, size_t n) {
	while (n > 0) {
		ssize_t w = write(fd, b, n);
		if (w <= 0)
			die("the broker is gone");
		b += w;
		n -= (size_t)w;
	}
}

/* packet writes a type, the length (7 bits a byte) and a body. */
static void packet(int fd, unsigned char type, const unsigned char *body, size_t n) {
	unsigned char head[5] = {type};
	size_t at = 1, left = n;
	do {
		head[at] = left & 0x7f;
		if (left >>= 7)
			head[at] |= 0x80;
		at++;
	} while (left > 0);
	send_all(fd, head, at);
	send_all(fd, body, n);
}

static size_t text(unsigned char *to, const char *s) {
	size_t n = strlen(s);
	if (n > 512)
		die("a text is too long");
	to[0] = n >> 8;
	to[1] = n;
	memcpy(to + 2, s, n);
	return n + 2;
}

static void read_all(int fd, unsigned char *b, size_t n) {
	while (n > 0) {
		ssize_t r = read(fd, b, n);
		if (r <= 0)
			die("the broker is gone");
		b += r;
		n -= (size_t)r;
	}
}

/* receive reads one packet, and returns its type and, in n, its length. */
static unsigned char receive(int fd, unsigned char *body, size_t *n) {
	unsigned char type, b;
	read_all(fd, &type, 1);
	*n = 0;
	for (int shift = 0; shift < 28; shift += 7) {
		read_all(fd, &b, 1);
		*n |= (size_t)(b & 0x7f) << shift;
		if (!(b & 0x80))
			break;
	}
	if (*n > MOST)
		die("a message is too long");
	read_all(fd, body, *n);
	return type;
}

static void show(const unsigned char *body, size_t n) {
	size_t topic = n < 2 ? 0 : (size_t)body[0] << 8 | body[1];
	if (topic + 2 > n)
		return;
	printf("received on %.*s: %.*s\n", (int)topic, body + 2, (int)(n - topic - 2), body + 2 + topic);
	fflush(stdout);
}

static int join(const char *broker) {
	char host[256];
	const char *colon = strrchr(broker, ':');
	if (!colon || (size_t)(colon - broker) >= sizeof host)
		die("BROKER is not host:port");
	memcpy(host, broker, colon - broker);
	host[colon - broker] = 0;
	int fd = dunlin_dial(host, atoi(colon + 1), 5000);
	if (fd < 0) {
		fprintf(stderr, "%s: %s\n", broker, strerror(-fd));
		exit(1);
	}
	return fd;
}

int main(void) {
	const char *broker = getenv("BROKER"), *topic = getenv("TOPIC");
	if (!broker || !topic)
		die("BROKER and TOPIC are not set");
	int fd = join(broker);
	unsigned char b[MOST];
	size_t n;
	memcpy(b, "\0\4MQTT\4\2\0\36", 10); /* version 4, a clean session, 30 s between signs of life */
	char id[32];
	unsigned r = 0;
	getentropy(&r, sizeof r);
	snprintf(id, sizeof id, "dunlin-%08x", r);
	packet(fd, CONNECT, b, 10 + text(b + 10, id));
	if (receive(fd, b, &n) != CONNACK || n < 2 || b[1] != 0)
		die("the broker refused");
	char commands[600];
	snprintf(commands, sizeof commands, "%.512s/set", topic);
	b[0] = 0, b[1] = 1;
	n = 2 + text(b + 2, commands);
	b[n++] = 0;
	packet(fd, SUBSCRIBE, b, n);
	printf("connected to %s\n", broker);
	fflush(stdout);
	for (int count = 0;; count++) {
		n = text(b, topic);
		n += (size_t)snprintf((char *)b + n, 64, "reading %d", count);
		packet(fd, PUBLISH, b, n);
		if (count % 20 == 19)
			packet(fd, PINGREQ, b, 0);
		struct pollfd p = {.fd = fd, .events = POLLIN};
		for (time_t until = time(0) + 1; time(0) < until;)
			if (poll(&p, 1, 1000) > 0 && (receive(fd, b, &n) & 0xf0) == PUBLISH)
				show(b, n);
	}
}
