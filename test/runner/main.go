// Command runner runs the tests of test/e2e side by side, since they mostly
// wait: all of them once, or the failure stories many times. A cycle is one run
// of one test: a process of the test binary, in network, mount and process
// namespaces of its own, so that no cycle sees another's nodes, and nothing of
// one that was killed is left. What passed is kept in a file, so that a long
// job goes on where it was; what failed keeps its logs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

type options struct {
	cycles, parallel int
	tests, outside   string
	once, short      bool
	job, logs        string
	timeout          time.Duration
	binaries         []string // the test binary is the first

	apart bool       // namespaces can be had
	world sync.Mutex // held by a cycle in the machine's own network
	goes  *regexp.Regexp
}

func main() {
	var o options
	flag.IntVar(&o.cycles, "cycles", 1, "how often each test runs")
	flag.IntVar(&o.parallel, "parallel", 1, "how many cycles run side by side, at most 15")
	flag.StringVar(&o.tests, "tests", "^TestStory", "which tests")
	flag.StringVar(&o.outside, "outside", "^$", "which of them need the machine's own network")
	flag.BoolVar(&o.once, "once", false, "not at the length of a long job: what a test leaves out is told, and no failure; one or two that fail are run again, alone")
	flag.BoolVar(&o.short, "short", false, "-test.short")
	flag.StringVar(&o.job, "job", "", "file that keeps what passed; without one it is forgotten")
	flag.StringVar(&o.logs, "logs", "", "folder of the cycles' logs")
	flag.DurationVar(&o.timeout, "timeout", 45*time.Minute, "of one cycle")
	flag.Parse()
	o.binaries = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &o); err != nil {
		fmt.Fprintln(os.Stderr, "runner:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o *options) error {
	if len(o.binaries) == 0 || o.cycles < 1 || o.parallel < 1 || o.parallel > 15 {
		return errors.New("usage: runner -cycles n -parallel n (1 to 15) TEST-BINARY OTHER-BINARY...")
	}
	var err error
	if o.goes, err = regexp.Compile(o.outside); err != nil {
		return fmt.Errorf("which tests need the machine's network: %w", err)
	}
	if o.apart = canPart(ctx); !o.apart && o.parallel > 1 {
		_, _ = fmt.Fprintln(os.Stdout, "runner: namespaces cannot be had here (root is needed): one test at a time, in the machine's own network")
		o.parallel = 1
	}
	names, err := list(ctx, o.binaries[0], o.tests)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.logs, 0o755); err != nil {
		return fmt.Errorf("folder of logs: %w", err)
	}
	j, err := openJob(o.job, o.binaries)
	if err != nil {
		return err
	}
	defer j.close()
	var todo []cycle
	for n := 1; n <= o.cycles; n++ {
		for _, name := range names {
			if c := (cycle{name, n}); !j.has(c) {
				todo = append(todo, c)
			}
		}
	}
	runAll(ctx, o, j, todo)
	var flaky []cycle
	if failed := j.failures(); o.once && len(failed) <= maxAgain && ctx.Err() == nil {
		for _, c := range failed {
			_, _ = fmt.Fprintf(os.Stdout, "runner: %s again, alone\n", c)
			keepFirst(o, c)
			if runAll(ctx, o, j, []cycle{c}); !slices.Contains(j.failures(), c) {
				flaky = append(flaky, c)
			}
		}
	}
	told := names
	if o.once { // each was printed with its time
		told = nil
		for _, c := range slices.Concat(flaky, j.failures()) {
			told = append(told, c.test)
		}
	}
	bad := j.table(told, o.cycles)
	for _, c := range flaky {
		_, _ = fmt.Fprintf(os.Stdout, "FLAKY: %s failed, and passed when run again: a fault to be found, in the product or in its test\n", c)
	}
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted: the same command goes on from here")
	case bad > 0:
		return fmt.Errorf("%d of %d cycles failed; their logs are in %s", bad, len(names)*o.cycles, o.logs)
	}
	return nil
}

// maxAgain is how many tests may fail once, and pass alone.
const maxAgain = 2

// runAll runs the cycles, as many side by side as may be.
func runAll(ctx context.Context, o *options, j *job, todo []cycle) {
	work := make(chan cycle)
	var wg sync.WaitGroup
	for slot := range min(o.parallel, len(todo)) {
		wg.Go(func() {
			runtime.LockOSThread() // a child ends with the thread that started it
			for c := range work {
				began := time.Now()
				verdict := tell(ctx, o, slot+1, c)
				if ctx.Err() == nil {
					j.ran(c, verdict, time.Since(began))
					if o.once {
						show(o, c, verdict)
					}
				}
			}
		})
	}
	for _, c := range todo {
		select {
		case work <- c:
		case <-ctx.Done():
		}
	}
	close(work)
	wg.Wait()
}

// show prints what a test said that failed or left something out.
func show(o *options, c cycle, verdict string) {
	text, err := os.ReadFile(logOf(o, c))
	if err == nil && (verdict != "" || strings.Contains(string(text), "--- SKIP: ")) {
		_, _ = os.Stdout.Write(text)
	}
}

// list is the names of the tests.
func list(ctx context.Context, binary, pattern string) ([]string, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, fmt.Errorf("which tests: %w", err)
	}
	cmd := exec.CommandContext(ctx, binary, "-test.list", "^Test")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the tests of %s: %w", binary, err)
	}
	var names []string
	for _, name := range strings.Fields(string(out)) {
		if re.MatchString(name) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no test has a name like %q", pattern)
	}
	return names, nil
}

// cycle is one run of a test, counted from 1.
type cycle struct {
	test string
	n    int
}

func (c cycle) String() string { return fmt.Sprintf("%s %d", c.test, c.n) }

// inside makes the namespaces' own network and /run and runs the test there.
// All of /run: a mount on /run/netns alone is detached when a test beside it,
// which has the host's, takes that folder away as it found it. The shell stays
// as the first process, which takes care of orphans.
const inside = `{ umount -l /run/netns 2>/dev/null || true; } && mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/netns /run/lock && ip link set lo up && "$@"; exit $?`

var apart = []string{"unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"}

// canPart says whether cycles can have namespaces of their own.
func canPart(ctx context.Context) bool {
	return exec.CommandContext(ctx, apart[0], append(apart[1:], "bash", "-c", inside, "try", "true")...).Run() == nil
}

// base is where a cycle's logs are: a file of this name with .log, what the
// test printed, and if it failed a folder of its processes' logs.
func base(o *options, c cycle) string {
	return filepath.Join(o.logs, fmt.Sprintf("%s-%02d", c.test, c.n))
}

func logOf(o *options, c cycle) string { return base(o, c) + ".log" }

// keepFirst sets aside what a failed cycle left, so that it can still be read
// when the cycle was run again.
func keepFirst(o *options, c cycle) {
	for _, name := range []string{base(o, c), logOf(o, c)} {
		aside := filepath.Join(o.logs, "first-"+filepath.Base(name))
		err := errors.Join(os.RemoveAll(aside), os.Rename(name, aside))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			_, _ = fmt.Fprintf(os.Stdout, "runner: what %s left is not kept: %v\n", c, err)
		}
	}
}

// tell runs one cycle; a verdict is "" when it passed.
func tell(ctx context.Context, o *options, slot int, c cycle) (verdict string) {
	_ = os.RemoveAll(base(o, c))
	// Short: the paths of sockets below are limited.
	tmp, err := os.MkdirTemp("", "dst")
	if err != nil {
		return err.Error()
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	log, err := os.Create(logOf(o, c))
	if err != nil {
		return err.Error()
	}
	defer func() { _ = log.Close() }()
	if err := os.Chmod(tmp, 0o711); err != nil {
		return err.Error()
	}
	line := []string{o.binaries[0], "-test.v", "-test.timeout", o.timeout.String(), "-test.run", "^" + c.test + "$"}
	if o.short {
		line = append(line, "-test.short")
	}
	if o.apart && !o.goes.MatchString(c.test) {
		line = slices.Concat(apart, []string{"bash", "-c", inside, "cycle"}, line)
	} else {
		o.world.Lock()
		defer o.world.Unlock()
	}
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, fmt.Sprintf("DUNLIN_TEST_SLOT=%d", slot), "DUNLIN_TEST_LOGS="+base(o, c))
	if !o.once {
		cmd.Env = append(cmd.Env, "CYCLES=1", fmt.Sprintf("CYCLE=%d", c.n))
	}
	cmd.Stdout, cmd.Stderr = log, log
	// A session of its own: where the kernel shares the processors out by
	// session, a cycle has as much as any other command.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	err = cmd.Run()
	text, rerr := os.ReadFile(logOf(o, c))
	if err := errors.Join(err, rerr); err != nil {
		return err.Error()
	}
	return judge(c.test, string(text), o.once)
}

// judge reads what a test that ended well printed: in a long job only one that
// was told in full has passed.
func judge(test, text string, skips bool) string {
	passed := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "--- SKIP: ") && !skips {
			return "a part was skipped: " + strings.TrimPrefix(line, "--- SKIP: ")
		}
		passed = passed || strings.HasPrefix(line, "--- PASS: "+test+" ") || strings.HasPrefix(line, "--- SKIP: "+test+" ")
	}
	if !passed {
		return "it was not told"
	}
	return ""
}
