package client

import (
	"context"
	"errors"
	"io"
	"net/url"
	"strconv"
)

// HalfConn is a connection whose directions end one by one, as TCP's.
type HalfConn interface {
	io.ReadWriter
	CloseWrite() error
}

// Forward joins conn with a port of a pod (path is of its sub-resource
// portforward) until both directions have ended. The caller closes conn.
func (c *Client) Forward(ctx context.Context, path string, port int32, conn HalfConn) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s, err := c.stream(ctx, path, url.Values{"ports": {strconv.Itoa(int(port))}})
	if err != nil {
		return err
	}
	defer s.close()
	go func() {
		if s.send(chForward, conn) != nil {
			cancel(errGone)
		}
	}()
	var skip [2]int // each channel begins with the port, two bytes
	var said []byte
	err = s.read(func(channel byte, p []byte) error {
		if channel == chClose && p[0] == chForward {
			return gone(conn.CloseWrite())
		}
		if channel > chForwardError {
			return nil
		}
		n := min(len(p), 2-skip[channel])
		skip[channel] += n
		if p = p[n:]; channel == chForwardError {
			said = append(said, p...)
			return nil
		}
		_, err := conn.Write(p)
		return gone(err)
	})
	switch {
	case errors.Is(err, errGone), errors.Is(context.Cause(ctx), errGone):
		return nil
	case len(said) > 0:
		return errors.New(string(said))
	}
	return err
}

// errGone ends a forward whose near end is gone: nobody is left to hear it.
var errGone = errors.New("the connection was given up")

func gone(err error) error {
	if err != nil {
		return errGone
	}
	return nil
}
