// The program that the conformance suite runs as a Wasm container; its
// counterpart for OCI containers is runtime/oci/testdata/guest.sh.
// clang --target=wasm32-wasi -Os -s -o guest.wasm guest.c
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

int main(int argc, char **argv) {
	setvbuf(stdout, NULL, _IOLBF, 0);
	const char *what = argc > 1 ? argv[1] : "";
	if (!strcmp(what, "print")) {
		for (int i = 2; i < argc; i++) puts(argv[i]);
		fputs("to stderr\n", stderr);
		return 0;
	}
	if (!strcmp(what, "exit")) return atoi(argv[2]);
	if (!strcmp(what, "env")) {
		for (char **e = environ; *e; e++) puts(*e);
		return 0;
	}
	if (!strcmp(what, "cat")) {
		FILE *f = fopen(argv[2], "r");
		if (!f) { perror(argv[2]); return 1; }
		for (int c; (c = getc(f)) != EOF;) putchar(c);
		return 0;
	}
	if (!strcmp(what, "write")) {
		FILE *f = fopen(argv[2], "w");
		if (!f || fputs(argv[3], f) < 0 || fclose(f)) { perror(argv[2]); return 1; }
		return 0;
	}
	if (!strcmp(what, "lines")) {
		int n = atoi(argv[2]);
		for (int i = 0; i < n; i++) printf("line %d of some length, so that files fill up\n", i);
		return 0;
	}
	if (!strcmp(what, "wait")) { // until it is asked to end
		puts("waiting");
		while (getchar() != EOF) {}
		puts("bye");
		return 0;
	}
	if (!strcmp(what, "stubborn")) {
		puts("waiting");
		for (;;) sleep(1000);
	}
	if (!strcmp(what, "spin")) {
		puts("spinning");
		for (volatile unsigned i = 0;; i++) {}
	}
	if (!strcmp(what, "eat")) {
		puts("eating");
		for (;;) {
			char *p = malloc(1 << 20);
			if (!p) return 99; // the host's own cap on its guest
			for (int i = 0; i < 1 << 20; i += 512) ((volatile char *)p)[i] = 1;
		}
	}
	fprintf(stderr, "unknown command\n");
	return 2;
}
