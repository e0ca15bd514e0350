// Command stories tells the failure stories of test/e2e many times, several
// cycles side by side: a cycle mostly waits. Each cycle is a process of the
// test binary, in network, mount and process namespaces of its own, so that no
// cycle sees another's nodes, and nothing of one that was killed is left. What
// passed is kept in a file, so that a long job goes on where it was; what
// failed keeps its logs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

type options struct {
	cycles, parallel int
	stories          string
	job, logs        string
	timeout          time.Duration
	binaries         []string // the test binary is the first
}

func main() {
	var o options
	flag.IntVar(&o.cycles, "cycles", 1, "how often each story is told")
	flag.IntVar(&o.parallel, "parallel", 1, "how many cycles run side by side, at most 15")
	flag.StringVar(&o.stories, "stories", "^TestStory", "which stories")
	flag.StringVar(&o.job, "job", "", "file that keeps what passed")
	flag.StringVar(&o.logs, "logs", "", "folder of the cycles' logs")
	flag.DurationVar(&o.timeout, "timeout", 45*time.Minute, "of one cycle")
	flag.Parse()
	o.binaries = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "stories:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if len(o.binaries) == 0 || o.cycles < 1 || o.parallel < 1 || o.parallel > 15 {
		return errors.New("usage: stories -cycles n -parallel n (1 to 15) TEST-BINARY OTHER-BINARY...")
	}
	names, err := list(ctx, o.binaries[0], o.stories)
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
	work := make(chan cycle)
	var wg sync.WaitGroup
	for slot := range o.parallel {
		wg.Go(func() {
			runtime.LockOSThread() // a child ends with the thread that started it
			for c := range work {
				began := time.Now()
				verdict := tell(ctx, o, slot+1, c)
				if ctx.Err() == nil {
					j.ran(c, verdict, time.Since(began))
				}
			}
		})
	}
	all := 0
	for n := 1; n <= o.cycles; n++ {
		for _, name := range names {
			all++
			c := cycle{name, n}
			if j.has(c) {
				continue
			}
			select {
			case work <- c:
			case <-ctx.Done():
			}
		}
	}
	close(work)
	wg.Wait()
	bad := j.table(names, o.cycles)
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted: the same command goes on from here")
	case bad > 0:
		return fmt.Errorf("%d of %d cycles failed; their logs are in %s", bad, all, o.logs)
	}
	return nil
}

// list is the names of the stories.
func list(ctx context.Context, binary, pattern string) ([]string, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, fmt.Errorf("which stories: %w", err)
	}
	cmd := exec.CommandContext(ctx, binary, "-test.list", "^TestStory")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the stories of %s: %w", binary, err)
	}
	var names []string
	for _, name := range strings.Fields(string(out)) {
		if re.MatchString(name) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no story has a name like %q", pattern)
	}
	return names, nil
}

// cycle is one telling of a story, counted from 1.
type cycle struct {
	story string
	n     int
}

func (c cycle) String() string { return fmt.Sprintf("%s %d", c.story, c.n) }

// inside makes the namespaces' own network and runs the test there. The shell
// stays as the first process, which takes care of orphans.
const inside = `mount -t tmpfs tmpfs /run/netns && ip link set lo up && "$@"; exit $?`

// tell tells one story once; a verdict is "" when it passed.
func tell(ctx context.Context, o options, slot int, c cycle) (verdict string) {
	base := filepath.Join(o.logs, fmt.Sprintf("%s-%02d", c.story, c.n))
	_ = os.RemoveAll(base)
	// Short: the paths of sockets below are limited.
	tmp, err := os.MkdirTemp("", "dst")
	if err != nil {
		return err.Error()
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	log, err := os.Create(base + ".log")
	if err != nil {
		return err.Error()
	}
	defer func() { _ = log.Close() }()
	if err := errors.Join(os.MkdirAll("/run/netns", 0o755), os.Chmod(tmp, 0o711)); err != nil {
		return err.Error()
	}
	cmd := exec.CommandContext(ctx, "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private",
		"bash", "-c", inside, "story", o.binaries[0], "-test.v", "-test.timeout", o.timeout.String(), "-test.run", "^"+c.story+"$")
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "CYCLES=1", fmt.Sprintf("CYCLE=%d", c.n), fmt.Sprintf("DUNLIN_TEST_SLOT=%d", slot), "DUNLIN_TEST_LOGS="+base)
	cmd.Stdout, cmd.Stderr = log, log
	// A session of its own: where the kernel shares the processors out by
	// session, a cycle has as much as any other command.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	err = cmd.Run()
	text, rerr := os.ReadFile(base + ".log")
	if err := errors.Join(err, rerr); err != nil {
		return err.Error()
	}
	return judge(c.story, string(text))
}

// judge reads what a test that ended well printed: only one that was told in
// full has passed.
func judge(story, text string) string {
	passed := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "--- SKIP: ") {
			return "a part was skipped: " + strings.TrimPrefix(line, "--- SKIP: ")
		}
		passed = passed || strings.HasPrefix(line, "--- PASS: "+story+" ")
	}
	if !passed {
		return "it was not told"
	}
	return ""
}
