//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// board is one machine of the README: network, host name, processes, /etc,
// /run and /var/lib are its own, and dunlin runs with its default folders.
type board struct {
	t    *testing.T
	name string
	on   *cluster.Machine
	dir  string // its disk
	init *exec.Cmd
	out  bytes.Buffer // of its first process
}

// boardInit is the first process of a board.
const boardInit = `set -e
mount --make-rprivate /
mount -t proc proc /proc
mkdir -p "$DISK"/{etc,work,lib}
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$DISK/etc,workdir=$DISK/work" /etc
[ -e "$DISK/booted" ] || rm -rf /etc/dunlin # what this host has is not the board's
touch "$DISK/booted"
mount --bind "$DISK/lib" /var/lib
mount -t tmpfs -o mode=755 tmpfs /run
hostname "$NAME"
echo booted
exec sleep infinity
`

func (b *board) boot() {
	b.t.Helper()
	b.on.Heal()
	b.out.Reset()
	b.init = exec.Command("nsenter", "--net="+b.on.Path(), "--", "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--", "bash", "-c", boardInit)
	b.init.Env = append(os.Environ(), "DISK="+b.dir, "NAME="+b.name)
	r, err := b.init.StdoutPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	b.init.Stderr = &b.out
	if err := b.init.Start(); err != nil {
		b.t.Fatal(err)
	}
	if line := make([]byte, 7); func() bool { _, err := r.Read(line); return err != nil }() || string(line) != "booted\n" {
		b.powerOff()
		b.t.Fatalf("%s did not boot: %s", b.name, b.out.String())
	}
}

// powerOff ends everything that runs on the board at once; its network is
// silent until the next boot.
func (b *board) powerOff() {
	if b.init == nil {
		return
	}
	b.on.Cut()
	_ = b.init.Process.Kill() // and with it, the first process of the namespace
	_ = b.init.Wait()
	b.init = nil
}

// first is the pid of the board's first process.
func (b *board) first() string {
	b.t.Helper()
	list, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", b.init.Process.Pid, b.init.Process.Pid))
	if err != nil || len(bytes.Fields(list)) == 0 {
		b.t.Fatalf("%s has no first process: %v", b.name, err)
	}
	return string(bytes.Fields(list)[0])
}

// shell runs a line of the README on the board.
func (b *board) shell(ctx context.Context, line string) (string, error) {
	cmd := exec.CommandContext(ctx, "nsenter", "--target", b.first(), "--net", "--mount", "--uts", "--pid", "--", "bash", "-c", "cd "+cluster.Root(b.t)+"; "+line)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(b.dir, "bin")+":"+filepath.Dir(cluster.Binary(b.t))+":"+os.Getenv("PATH"), "DUNLIN_CGROUP=readme-"+b.name+fmt.Sprint(os.Getpid()))
	cmd.Env = slices.DeleteFunc(cmd.Env, func(s string) bool { return strings.HasPrefix(s, "KUBECONFIG=") })
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// step is one line of the chapter, with what it shall print.
type step struct {
	board, line string
	want        []string
}

var prompt = regexp.MustCompile(`^(pi-\d)\$ (.+)$`)

// readChapter reads the steps of one chapter of the README.
func readChapter(t *testing.T, title string) (steps []step) {
	b, err := os.ReadFile(filepath.Join(cluster.Root(t), "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(b), "\n## "+title+"\n")
	if !found {
		t.Fatalf("the README has no chapter %q", title)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	inside := false
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		switch m := prompt.FindStringSubmatch(line); {
		case strings.HasPrefix(line, "```"):
			inside = line == "```console"
		case inside && m != nil:
			steps = append(steps, step{board: m[1], line: m[2]})
		case inside:
			last := &steps[len(steps)-1]
			last.want = append(last.want, line)
		}
	}
	return steps
}

// shows says whether the output is what the README prints: as many lines, the
// same words up to an ellipsis.
func shows(out string, want []string) bool {
	got := strings.Split(strings.TrimSpace(out), "\n")
	if len(got) != len(want) {
		return false
	}
	for i, line := range want {
		g, open := strings.Fields(got[i]), false
		w := strings.Fields(line)
		if open = w[len(w)-1] == "…"; open {
			w = w[:len(w)-1]
		}
		if len(g) < len(w) || !open && len(g) != len(w) || !slices.Equal(g[:len(w)], w) {
			return false
		}
	}
	return true
}

// TestReadmeFleet follows the README from one Pi to a fleet, word by word. A
// line without output must succeed; one with output is repeated, as a reader
// does, until it prints that.
func TestReadmeFleet(t *testing.T) {
	site := cluster.NewSite(t)
	boards := map[string]*board{}
	for _, name := range []string{"pi-1", "pi-2", "pi-3", "pi-4"} {
		b := &board{t: t, name: name, on: site.NewMachine(), dir: t.TempDir()}
		check(t, os.Mkdir(filepath.Join(b.dir, "bin"), 0o755))
		check(t, os.WriteFile(filepath.Join(b.dir, "bin", "sudo"), []byte("#!/bin/sh\nexec \"$@\"\n"), 0o755))
		b.boot()
		boards[name] = b
		t.Cleanup(func() {
			if b.init != nil {
				_, _ = b.shell(context.Background(), "pkill -TERM dunlin; dunlin server sweep")
			}
			b.powerOff()
			if t.Failed() {
				for _, f := range slices.Sorted(maps.Keys(logs(b.dir))) {
					t.Logf("%s of %s ends:\n%s", f, b.name, logs(b.dir)[f])
				}
			}
		})
	}
	steps := readChapter(t, "From one Pi to a fleet")
	if len(steps) < 20 {
		t.Fatalf("only %d steps: %v", len(steps), steps)
	}
	var joinLine string
	began := time.Now()
	for i, s := range steps {
		b, line := boards[s.board], strings.ReplaceAll(s.line, "LINE", joinLine)
		at := time.Now()
		if b.init == nil {
			b.boot() // somebody pressed the button
		}
		switch {
		case line == "sudo poweroff -f":
			b.powerOff()
		case strings.HasSuffix(line, "&"):
			log := filepath.Join(b.dir, fmt.Sprintf("log-%d", i))
			if _, err := b.shell(t.Context(), fmt.Sprintf("setsid %s >%s 2>&1 </dev/null &", strings.TrimSuffix(line, " &"), log)); err != nil {
				t.Fatal(err)
			}
			b.up(t)
		default:
			out := b.follow(t, line, s.want)
			if l := regexp.MustCompile(`(?m)^dunlin1\.\S+$`).FindString(out); l != "" {
				joinLine = l
			}
		}
		t.Logf("%s$ %s (%.1f s)", s.board, s.line, time.Since(at).Seconds())
	}
	t.Logf("from one Pi to a fleet in %.0f s", time.Since(began).Seconds())
}

// up waits until what was started answers, as a reader does who sees its first
// lines.
func (b *board) up(t *testing.T) {
	t.Helper()
	var out string
	for range 600 {
		var err error
		if out, err = b.shell(t.Context(), "dunlin get nodes --local"); err == nil {
			return
		}
		pause(t, 200*time.Millisecond)
	}
	t.Fatalf("nothing answers on %s: %s", b.name, out)
}

// follow runs a line until it prints what it shall.
func (b *board) follow(t *testing.T, line string, want []string) (out string) {
	t.Helper()
	for range 300 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		var err error
		out, err = b.shell(ctx, line)
		cancel()
		if want == nil {
			if err != nil {
				t.Fatalf("%s$ %s: %v: %s", b.name, line, err, out)
			}
			return out
		}
		if err == nil && shows(out, want) {
			return out
		}
		pause(t, 200*time.Millisecond)
	}
	t.Fatalf("%s$ %s does not print\n%s\nbut\n%s", b.name, line, strings.Join(want, "\n"), out)
	return ""
}

func logs(dir string) map[string]string {
	out := map[string]string{}
	files, _ := filepath.Glob(filepath.Join(dir, "log-*"))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		out[filepath.Base(f)] = string(b[max(len(b)-6000, 0):])
	}
	return out
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
