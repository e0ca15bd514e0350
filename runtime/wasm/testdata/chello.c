// The C guest of the benchmarks: prints a line, then waits for the end of
// its standard input.
#include <stdio.h>
#include <unistd.h>

int main(void) {
	char c;
	puts("hello from C");
	fflush(stdout);
	while (read(0, &c, 1) > 0) {
	}
	return 0;
}
