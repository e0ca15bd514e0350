package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// AgentError says that the agent of this machine does not answer, and what to
// look at.
type AgentError struct {
	Socket string
	Err    error
}

// Error implements error.
func (e *AgentError) Error() string {
	switch {
	case errors.Is(e.Err, fs.ErrNotExist):
		if e.Socket != rootSocket && RootAgent() {
			return fmt.Sprintf("no agent of this user runs here: there is no %s; root's does (try sudo)", e.Socket)
		}
		return fmt.Sprintf("no agent runs here: there is no %s (start one with 'dunlin agent', or name its run-time folder with --run-dir)", e.Socket)
	case errors.Is(e.Err, fs.ErrPermission):
		return fmt.Sprintf("the agent's socket %s may not be read: only root, and the user that the agent runs as, may (try sudo)", e.Socket)
	}
	return fmt.Sprintf("the agent does not answer at %s: %v (was it killed? 'dunlin agent' starts it again; what runs goes on)", e.Socket, root(e.Err))
}

const rootSocket = "/run/dunlin/agent.sock"

// RootAgent says whether an agent of root's, in the default folders, is (or
// was) on this machine.
func RootAgent() bool {
	_, err := os.Stat(rootSocket)
	return err == nil || errors.Is(err, fs.ErrPermission)
}

// Unwrap gives the cause.
func (e *AgentError) Unwrap() error { return e.Err }

// NewLocal makes a client of the agent of this machine, which answers on its
// socket with what it knows, also without any server.
func NewLocal(socket, version string) *Client {
	return &Client{
		base: "http://agent", socket: socket, userAgent: "dunlin/" + version,
		http: &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", socket)
			},
		}},
	}
}

// Local says whether the client asks the agent of this machine.
func (c *Client) Local() bool { return c.socket != "" }

// LocalResources are what an agent tells about.
func LocalResources() []Resource {
	core := func(kind, plural, singular string, namespaced bool, short ...string) Resource {
		return Resource{
			GVK: schema.GroupVersionKind{Version: "v1", Kind: kind}, Name: plural, Singular: singular, ShortNames: short,
			Namespaced: namespaced, Verbs: []string{"get", "list"},
		}
	}
	return []Resource{
		core("Pod", "pods", "pod", true, "po"), core("Node", "nodes", "node", false, "no"), core("Event", "events", "event", true, "ev"),
	}
}
