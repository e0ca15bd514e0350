package claim

import (
	"bufio"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestMain lets the test be a process that holds a claim until it is killed.
func TestMain(m *testing.M) {
	if path := os.Getenv("CLAIM_HOLD"); path != "" {
		if _, err := Take(path, Holder{StateDir: "/s", RunDir: "/r"}); err != nil {
			os.Exit(3)
		}
		// A child that outlives its parent, as guests do.
		child := exec.Command("cat")
		child.Stdin = os.Stdin
		if err := child.Start(); err != nil {
			os.Exit(4)
		}
		_, _ = os.Stdout.WriteString("held\n")
		select {}
	}
	os.Exit(m.Run())
}

func TestHeldByAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "made", "lock")
	p := exec.Command(os.Args[0])
	p.Env = append(os.Environ(), "CLAIM_HOLD="+path)
	in, err := p.StdinPipe() // ends the grandchild, at the end of the test
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "held\n" {
		t.Fatalf("holder: %q, %v", line, err)
	}
	_, err = Take(path, Holder{})
	var held *HeldError
	if !errors.As(err, &held) || !errors.Is(err, ErrHeld) || held.By.PID != p.Process.Pid {
		t.Fatalf("got %v, want it held by process %d", err, p.Process.Pid)
	}
	if !strings.Contains(err.Error(), "--state-dir /s --run-dir /r") {
		t.Fatalf("the holder is not described: %v", err)
	}
	if by, there := By(path); !there || by.PID != p.Process.Pid {
		t.Fatalf("held by %+v, %v", by, there)
	}
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, out)
	_ = p.Wait()
	c, err := Take(path, Holder{}) // at once, although its child still runs
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Take(path, Holder{}); !errors.Is(err, ErrHeld) {
		t.Fatalf("taken twice: %v", err)
	}
	c.Release()
	c.Release()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("left behind: %v", err)
	}
	if c, err = Take(path, Holder{}); err != nil {
		t.Fatal(err)
	}
	if !Held(path) || Held(path+"x") {
		t.Fatal("who holds what is wrong")
	}
	c.Release()
}

// TestOneAtATime: files come and go, and so do folders, and never do two hold
// the same.
func TestOneAtATime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	var holders, taken atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for taken.Load() < 500 {
				c, err := Take(filepath.Join(dir, "lock"), Holder{})
				if errors.Is(err, ErrHeld) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d hold it", n)
				}
				taken.Add(1)
				holders.Add(-1)
				c.Release()
				_ = os.Remove(dir)
			}
		})
	}
	wg.Wait()
}

func TestRemovedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	if err := os.Symlink("/dev/null", path); err != nil {
		t.Fatal(err)
	}
	if _, err := Take(path, Holder{}); err == nil {
		t.Fatal("a link was followed")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	c, err := Take(path, Holder{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Release()
	if same, err := isAt(c.f, path); err != nil || !same {
		t.Fatal(same, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if same, err := isAt(c.f, path); err != nil || same {
		t.Fatal("a removed file counts as there", err)
	}
}

func TestFolderThatCannotBe(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dangling")
	if err := os.Symlink("nowhere", dir); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) { // it is tried for seconds
		if _, err := Take(filepath.Join(dir, "lock"), Holder{}); err == nil {
			t.Fatal("taken")
		}
	})
}

// TestFolderThatTakesLongToGo: the folder is in the way for as long as the one
// who removes it gets no processor.
func TestFolderThatTakesLongToGo(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "going")
	if err := os.Symlink("nowhere", dir); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		time.AfterFunc(2*time.Second, func() { _ = os.Remove(dir) })
		c, err := Take(filepath.Join(dir, "lock"), Holder{})
		if err != nil {
			t.Fatal(err)
		}
		c.Release()
	})
}

// TestRenew: a file that somebody removed is made again, and then holds off
// others; what another took meanwhile is left to it.
func TestRenew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	path := filepath.Join(dir, "lock")
	c, err := Take(path, Holder{RunDir: "/r"})
	if err != nil {
		t.Fatal(err)
	}
	if made, err := c.Renew(); err != nil || made {
		t.Fatalf("made %v, %v, though it is there", made, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if made, err := c.Renew(); err != nil || !made {
		t.Fatalf("made %v, %v", made, err)
	}
	var held *HeldError
	if _, err := Take(path, Holder{}); !errors.As(err, &held) || held.By.RunDir != "/r" {
		t.Fatalf("got %v, want it held by /r", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	other, err := Take(path, Holder{RunDir: "/other"})
	if err != nil {
		t.Fatal(err)
	}
	if made, err := c.Renew(); made || !errors.As(err, &held) || held.By.RunDir != "/other" {
		t.Fatalf("made %v, %v, though another holds it", made, err)
	}
	other.Release()
	if made, err := c.Renew(); err != nil || !made {
		t.Fatalf("made %v, %v, though the other one is gone", made, err)
	}
	c.Release()
	if Held(path) {
		t.Fatal("held after its release")
	}
}
