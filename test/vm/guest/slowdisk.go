package main

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dunlin-project/dunlin/cli/client"
)

// slowFlush is what a bad SD card takes for an fsync.
const slowFlush = 1500 * time.Millisecond

// writesEach are made in each phase.
const writesEach = 10

// trio is three servers, each with a disk of its own behind dm-delay.
type trio struct {
	g       *guest
	servers [3]*exec.Cmd
	slow    [3]bool
	n       int // objects made
}

func (*trio) dir(i int) string    { return fmt.Sprintf("/srv/s%d", i+1) }
func (*trio) log(i int) string    { return fmt.Sprintf("/tmp/s%d.log", i+1) }
func (*trio) below(i int) string  { return fmt.Sprintf("/dev/loop%d", i+1) }
func (*trio) config(i int) string { return fmt.Sprintf("/etc/s%d/admin.kubeconfig", i+1) }

// disks makes three that are quick at first.
func (t *trio) disks() error {
	f, err := os.Open("/slow.img.gz")
	if err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	blank, err := io.ReadAll(z)
	if err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	for i := range t.servers {
		image := fmt.Sprintf("/tmp/disk%d", i+1)
		if err := sparse(image, blank); err != nil {
			return err
		}
		if _, err := t.g.must("losetup", t.below(i), image); err != nil {
			return err
		}
		if err := dmDelay(fmt.Sprintf("slow%d", i+1), t.below(i), true, 0); err != nil {
			return err
		}
		if err := os.MkdirAll(t.dir(i), 0o711); err != nil {
			return fmt.Errorf("mount point: %w", err)
		}
		if _, err := t.g.must("mount", "-t", "ext4", fmt.Sprintf("/dev/dm-%d", i), t.dir(i)); err != nil {
			return err
		}
	}
	return nil
}

// sparse writes a file without its blocks of zeros.
func sparse(path string, content []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	const block = 4096
	zeros := make([]byte, block)
	err = f.Truncate(int64(len(content)))
	for i := 0; i < len(content) && err == nil; i += block {
		if b := content[i:min(i+block, len(content))]; !bytes.Equal(b, zeros[:len(b)]) {
			_, err = f.WriteAt(b, int64(i))
		}
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	return nil
}

// pace makes the disks slow or quick, and measures each.
func (t *trio) pace(slow [3]bool) error {
	t.slow = slow
	for i, s := range slow {
		d := time.Duration(0)
		if s {
			d = slowFlush
		}
		if err := dmDelay(fmt.Sprintf("slow%d", i+1), t.below(i), false, d); err != nil {
			return err
		}
		took, err := syncTime(filepath.Join(t.dir(i), "probe"))
		if err != nil {
			return err
		}
		if s != (took >= slowFlush) {
			return fmt.Errorf("fsync on the disk of s%d takes %s; slow: %v", i+1, took, s)
		}
		if s {
			t.g.ok("fsync on the disk of s%d takes %.2f s", i+1, took.Seconds())
		}
	}
	return nil
}

func syncTime(path string) (time.Duration, error) {
	f, err := os.Create(path)
	if err != nil {
		return 0, fmt.Errorf("probe: %w", err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteString("x"); err != nil {
		return 0, fmt.Errorf("probe: %w", err)
	}
	start := time.Now()
	if err := f.Sync(); err != nil {
		return 0, fmt.Errorf("probe: %w", err)
	}
	return time.Since(start), nil
}

// start runs server i, with a join line unless it is the first.
func (t *trio) start(i int, line string) error {
	log, err := os.Create(t.log(i))
	if err != nil {
		return fmt.Errorf("log: %w", err)
	}
	defer func() { _ = log.Close() }()
	args := []string{
		"server", "--no-node", "--node-name", fmt.Sprintf("s%d", i+1), "--listen", fmt.Sprintf("127.0.0.1:%d", 7001+i), "--gossip-port", "0",
		"--state-dir", filepath.Join(t.dir(i), "state"), "--run-dir", fmt.Sprintf("/run/s%d", i+1), "--config-dir", filepath.Dir(t.config(i)),
	}
	if line != "" {
		args = append(args, "--join", line)
	}
	cmd := exec.Command("/dunlin", args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start s%d: %w", i+1, err)
	}
	t.servers[i] = cmd
	return t.g.until(fmt.Sprintf("s%d answers", i+1), func() error {
		a, err := newAPI(t.config(i))
		if err != nil {
			return err
		}
		return a.get(t.g.ctx, "/api/v1/namespaces/kube-system", &struct{}{})
	})
}

// leader is the server that leads, and its term.
func (t *trio) leader() (i int, term float64, err error) {
	i = -1
	err = t.g.until("a server leads", func() error {
		for k := range t.servers {
			if t.servers[k] == nil {
				continue
			}
			a, err := newAPI(t.config(k))
			if err != nil {
				return err
			}
			body, err := a.c.Do(t.g.ctx, client.Request{Method: http.MethodGet, Path: "/metrics", Accept: "text/plain"})
			if err != nil {
				return fmt.Errorf("figures of s%d: %w", k+1, err)
			}
			text, err := io.ReadAll(body)
			if err := errors.Join(err, body.Close()); err != nil {
				return fmt.Errorf("figures of s%d: %w", k+1, err)
			}
			leads, err := figure(string(text), "dunlin_raft_leading")
			if err == nil {
				term, err = figure(string(text), "dunlin_raft_term")
			}
			if err != nil {
				return fmt.Errorf("figures of s%d: %w", k+1, err)
			}
			if leads == 1 {
				i = k
				return nil
			}
		}
		return errors.New("nobody")
	})
	return i, term, err
}

// figure is one of the figures of a server.
func figure(text, name string) (float64, error) {
	_, rest, _ := strings.Cut(text, "\n"+name+" ")
	line, _, _ := strings.Cut(rest, "\n")
	v, err := strconv.ParseFloat(line, 64)
	if err != nil {
		return 0, fmt.Errorf("no %s: %w", name, err)
	}
	return v, nil
}

// write makes one object through server i, and returns how long it took.
func (t *trio) write(i int) (time.Duration, error) {
	a, err := newAPI(t.config(i))
	if err != nil {
		return 0, err
	}
	t.n++
	body := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"w%d"}}`, t.n)
	start := time.Now()
	r, err := a.c.Do(t.g.ctx, client.Request{Method: http.MethodPost, Path: "/api/v1/namespaces/default/configmaps", ContentType: "application/json", Body: []byte(body)})
	if err != nil {
		return 0, fmt.Errorf("write %d through s%d: %w", t.n, i+1, err)
	}
	return time.Since(start), r.Close()
}

// steady writes through server i for a while, during which nobody else may
// come to lead.
func (t *trio) steady(what string, i int) error {
	_, before, err := t.leader()
	if err != nil {
		return err
	}
	var took []time.Duration
	for range writesEach {
		d, err := t.write(i)
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		took = append(took, d)
		<-time.After(time.Second)
	}
	_, after, err := t.leader()
	if err != nil {
		return err
	}
	if after != before {
		return fmt.Errorf("%s: %.0f elections", what, after-before)
	}
	slices.Sort(took)
	t.g.ok("%s: 0 elections; %d writes, each took %.2f s (median), %.2f s (most)", what, writesEach, took[writesEach/2].Seconds(), took[writesEach-1].Seconds())
	return nil
}

// slowDisk is three servers on disks whose fsync takes 1.5 s: those of none,
// of a follower, of the leader, of all. It costs latency, and no leadership;
// and once the leader is lost another one leads.
func slowDisk(g *guest) (err error) {
	t := &trio{g: g}
	defer func() {
		for i, s := range t.servers {
			if s != nil {
				_ = s.Process.Kill()
				_ = s.Wait()
			}
			if b, rerr := os.ReadFile(t.log(i)); err != nil && rerr == nil {
				err = fmt.Errorf("%w\nthe log of s%d ends:\n%s", err, i+1, b[max(0, len(b)-3000):])
			}
		}
	}()
	if err := t.disks(); err != nil {
		return err
	}
	if err := t.start(0, ""); err != nil {
		return err
	}
	for i := 1; i < 3; i++ {
		line, err := g.must("/dunlin", "--kubeconfig", t.config(0), "token", "create", "--server")
		if err == nil {
			line, _, _ = strings.Cut(line, "\n") // behind it is a warning
			err = t.start(i, line)
		}
		if err != nil {
			return err
		}
	}
	err = g.until("three servers vote", func() error {
		out, err := g.must("/dunlin", "--kubeconfig", t.config(0), "server", "list")
		if n := strings.Count(out, " voter") + strings.Count(out, " leader"); err != nil || n != 3 {
			return fmt.Errorf("%s, %w", out, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	g.ok("three servers on disks of their own, each behind dm-delay")
	lead, _, err := t.leader()
	if err != nil {
		return err
	}
	follower := (lead + 1) % 3
	one := func(i int) (s [3]bool) { s[i] = true; return s }
	for _, phase := range []struct {
		what string
		slow [3]bool
	}{{"no disk is slow", [3]bool{}}, {"a follower's disk is slow", one(follower)}, {"the leader's disk is slow", one(lead)}, {"all disks are slow", [3]bool{true, true, true}}} {
		if err := t.pace(phase.slow); err != nil {
			return err
		}
		if err := t.steady(phase.what, follower); err != nil {
			return err
		}
	}
	return t.nextLeader(lead)
}

// nextLeader kills the leader while all disks are slow.
func (t *trio) nextLeader(lead int) error {
	_, before, err := t.leader()
	if err != nil {
		return err
	}
	_ = t.servers[lead].Process.Kill()
	_ = t.servers[lead].Wait()
	t.servers[lead] = nil
	next, after, err := t.leader()
	if err != nil {
		return err
	}
	t.g.ok("the leader is killed: s%d leads after %.0f elections", next+1, after-before)
	return t.steady("two are left, all disks are slow", next)
}
