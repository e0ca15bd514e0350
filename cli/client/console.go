package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TerminalSize is in characters.
type TerminalSize struct{ Width, Height uint16 }

// Console is the near end of an exec or attach.
type Console struct {
	In       io.Reader // nil: none
	Out, Err io.Writer // Err is not written to with a terminal
	// Sizes makes it a terminal; what is received is told the far end.
	Sizes <-chan TerminalSize
}

// Run runs a command in a container (sub-resource exec, with its command and
// container in q) or joins what runs there (attach), and returns the exit code.
// A Read of In may go on after Run has returned.
func (con *Console) Run(ctx context.Context, c *Client, path string, q url.Values) (int, error) {
	set := func(k string, ok bool) { q.Set(k, strconv.FormatBool(ok)) }
	set("stdin", con.In != nil)
	set("stdout", true)
	set("stderr", con.Sizes == nil)
	set("tty", con.Sizes != nil)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s, err := c.stream(ctx, path, q)
	if err != nil {
		return 0, err
	}
	defer s.close()
	if con.Sizes != nil {
		go con.resize(ctx, s)
	}
	if con.In != nil {
		go func() {
			if err := s.send(chStdin, con.In); err != nil {
				cancel(fmt.Errorf("read the input: %w", err))
			}
		}()
	}
	var status []byte
	err = s.read(func(channel byte, p []byte) (err error) {
		switch channel {
		case chStdout:
			_, err = con.Out.Write(p)
		case chStderr:
			_, err = con.Err.Write(p)
		case chError:
			status = append(status, p...)
		}
		return err
	})
	// Whoever gave it up, here, is not told what came of that there.
	if cause := context.Cause(ctx); cause != nil {
		return 0, cause
	}
	if len(status) > 0 { // it has ended, however the connection did
		return exitCode(status)
	}
	if err == nil {
		err = errors.New("the server ended the stream without saying how the command ended")
	}
	return 0, err
}

func (con *Console) resize(ctx context.Context, s *stream) {
	for {
		select {
		case <-ctx.Done():
			return
		case z := <-con.Sizes:
			b, err := json.Marshal(z)
			if err != nil || s.write(chResize, b) != nil {
				return
			}
		}
	}
}

// exitCode reads the status with which an exec ends.
func exitCode(status []byte) (int, error) {
	e := &StatusError{}
	if err := json.Unmarshal(status, &e.Status); err != nil {
		return 0, fmt.Errorf("read how the command ended, %q: %w", firstLine(status), err)
	}
	if e.Status.Status == metav1.StatusSuccess {
		return 0, nil
	}
	if e.Status.Reason == "NonZeroExitCode" && e.Status.Details != nil {
		for _, cause := range e.Status.Details.Causes {
			if n, err := strconv.Atoi(cause.Message); err == nil && cause.Type == "ExitCode" {
				return n, nil
			}
		}
	}
	return 0, e
}
