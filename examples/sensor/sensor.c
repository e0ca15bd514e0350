// Sensor appends a reading to a file on its volume every second, and keeps
// the file small: what a data logger at the edge does.
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define LIMIT (64 * 1024)

int main(void) {
	const char *path = getenv("SENSOR_FILE");
	if (path == NULL)
		path = "/data/readings.csv";
	unsigned count = 0;
	double value = 20.0;
	for (;;) {
		FILE *f = fopen(path, "a");
		if (f == NULL) {
			perror(path);
			return 1;
		}
		value += (double)(arc4random_uniform(201)) / 1000.0 - 0.1;
		fprintf(f, "%lld,%.3f\n", (long long)time(NULL), value);
		long size = ftell(f);
		if (fclose(f) != 0) {
			perror(path);
			return 1;
		}
		if (size > LIMIT && rename(path, "/data/readings.old.csv") != 0) {
			perror("rename");
			return 1;
		}
		if (count++ % 60 == 0) {
			printf("%u readings, the last one %.3f\n", count, value);
			fflush(stdout);
		}
		// A second, or the end of standard input: dunlin asks us to stop.
		struct pollfd in = {.fd = 0, .events = POLLIN};
		char c;
		if (poll(&in, 1, 1000) > 0 && read(0, &c, 1) <= 0) {
			puts("stopped");
			return 0;
		}
	}
}
