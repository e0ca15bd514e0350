package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

// forwardsMost bounds the connections of one port-forward: each takes one of
// the node's 32 places for streams, and others want some, too. More wait.
const forwardsMost = 16

func (a *app) portForwardCmd() *cobra.Command {
	var addresses []string
	c := &cobra.Command{
		Use:   "port-forward (POD | TYPE/NAME) [LOCAL:]REMOTE...",
		Short: "Reach ports of a pod through local ones",
		Long: `Reach ports of a pod through local ones, until Ctrl-C.

REMOTE is a port of the pod (of the Service, for svc/NAME), as a number or by
its name. Without LOCAL the same number is taken here, with an empty one
(":80") any that is free. One pod is chosen at the start; when it is gone the
command ends.`,
		Example: `  dunlin port-forward web 8080:80
  dunlin port-forward svc/web :http
  dunlin port-forward deploy/web 8080 9090:metrics --address 0.0.0.0`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completePods,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.portForward(cmd.Context(), args[0], args[1:], addresses)
		},
	}
	c.Flags().StringSliceVar(&addresses, "address", []string{"localhost"}, "local addresses to listen on")
	return a.namespaced(c)
}

// forwardedPort is one argument: Local is "" for the same as Remote.
type forwardedPort struct{ Local, Remote string }

func parseForward(arg string) (forwardedPort, error) {
	local, remote, ok := strings.Cut(arg, ":")
	if !ok {
		local, remote = "", arg
	} else if local == "" {
		local = "0"
	}
	if local != "" {
		if _, err := strconv.ParseUint(local, 10, 16); err != nil {
			return forwardedPort{}, usagef("%s: %q is no local port; [LOCAL:]REMOTE such as 8080:80 is wanted", arg, local)
		}
	}
	if n, err := strconv.ParseInt(remote, 10, 64); remote == "" || strings.Contains(remote, ":") || err == nil && (n < 1 || n > 65535) {
		return forwardedPort{}, usagef("%s: %q is no port of a pod; [LOCAL:]REMOTE such as 8080:80 is wanted", arg, remote)
	}
	return forwardedPort{local, remote}, nil
}

// podPort finds the port of p that is meant by remote: of the Service, unless
// that is nil.
func podPort(p *corev1.Pod, svc *corev1.Service, remote string) (int32, error) {
	n, nerr := strconv.ParseUint(remote, 10, 16)
	if svc != nil {
		var has []string
		for _, sp := range svc.Spec.Ports {
			if sp.Name == remote || nerr == nil && sp.Port == int32(n) {
				switch {
				case svc.Spec.ClusterIP == corev1.ClusterIPNone && sp.TargetPort.String() == "0":
					return sp.Port, nil
				case sp.TargetPort.StrVal != "":
					return podPort(p, nil, sp.TargetPort.StrVal)
				case sp.TargetPort.IntVal != 0:
					return sp.TargetPort.IntVal, nil
				}
				return sp.Port, nil
			}
			has = append(has, strings.TrimSuffix(strconv.Itoa(int(sp.Port))+"/"+sp.Name, "/"))
		}
		return 0, fmt.Errorf("service %s has no port %s (it has %s)", svc.Name, remote, strings.Join(has, ", "))
	}
	if nerr == nil {
		return int32(n), nil
	}
	for _, c := range p.Spec.Containers {
		for _, cp := range c.Ports {
			if cp.Name == remote {
				return cp.ContainerPort, nil
			}
		}
	}
	return 0, fmt.Errorf("no container of pod %s has a port named %q", p.Name, remote)
}

func (a *app) portForward(ctx context.Context, what string, args, addresses []string) error {
	var ports []forwardedPort
	for _, arg := range args {
		fp, err := parseForward(arg)
		if err != nil {
			return err
		}
		ports = append(ports, fp)
	}
	c, p, err := a.pod(ctx, what)
	if err != nil {
		return err
	}
	if p.Status.Phase != corev1.PodRunning {
		return fmt.Errorf("pod %s does not run (%s): 'dunlin describe pod %s' says why", p.Name, p.Status.Phase, p.Name)
	}
	svc, err := a.serviceOf(ctx, c, what)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	f := &forwarding{a: a, c: c, pod: p, end: cancel, places: make(chan struct{}, forwardsMost)}
	defer f.wg.Wait()
	defer cancel(nil)
	for _, fp := range ports {
		remote, err := podPort(p, svc, fp.Remote)
		if err != nil {
			return err
		}
		if fp.Local == "" {
			fp.Local = strconv.Itoa(int(remote))
			if _, err := strconv.Atoi(fp.Remote); err == nil {
				fp.Local = fp.Remote
			}
		}
		if err := f.listen(ctx, addresses, fp.Local, remote); err != nil {
			return err
		}
	}
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil // Ctrl-C is how it is meant to end
}

// serviceOf is the Service that what names; nil if it names something else.
func (a *app) serviceOf(ctx context.Context, c *client.Client, what string) (*corev1.Service, error) {
	if !strings.Contains(what, "/") {
		return nil, nil
	}
	ts, err := a.targets(ctx, c, []string{what})
	if err != nil || ts[0].res.GVK.Kind != "Service" {
		return nil, err
	}
	svc := &corev1.Service{}
	path := ts[0].res.Path(c.Namespace, ts[0].names[0])
	return svc, c.JSON(ctx, client.Request{Method: http.MethodGet, Path: path}, svc)
}

// forwarding is one port-forward. Its goroutines end with its context.
type forwarding struct {
	a      *app
	c      *client.Client
	pod    *corev1.Pod
	end    context.CancelCauseFunc
	places chan struct{}
	wg     sync.WaitGroup
	mu     sync.Mutex // of errors that are printed
}

// listen opens the local port. "localhost" is both loopback addresses, of
// which one may be missing.
func (f *forwarding) listen(ctx context.Context, addresses []string, local string, remote int32) error {
	for _, address := range addresses {
		tries := []string{address}
		if address == "localhost" {
			tries = []string{"127.0.0.1", "::1"}
		}
		var failed error
		var opened bool
		for _, host := range tries {
			l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, local))
			if err != nil {
				failed = errors.Join(failed, err)
				if host == "127.0.0.1" && local != "0" {
					break // it is in use: half of it would be somebody else's
				}
				continue
			}
			opened = true
			_, port, _ := net.SplitHostPort(l.Addr().String())
			local = port // that of the second address is the same
			f.serve(ctx, l, remote)
		}
		if !opened {
			return fmt.Errorf("listen on port %s: %w (another local port can be given as LOCAL:%d, any free one as :%d)", local, failed, remote, remote)
		}
	}
	return nil
}

func (f *forwarding) serve(ctx context.Context, l net.Listener, remote int32) {
	f.a.printf("Forwarding from %s -> %d\n", l.Addr(), remote)
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	f.wg.Go(func() {
		defer stop()
		for {
			conn, err := l.Accept()
			if err != nil {
				f.end(fmt.Errorf("listen on %s: %w", l.Addr(), err))
				return
			}
			select {
			case f.places <- struct{}{}:
			case <-ctx.Done():
				_ = conn.Close()
				return
			}
			f.wg.Go(func() {
				defer func() { <-f.places }()
				f.forward(ctx, conn.(*net.TCPConn), remote)
			})
		}
	})
}

func (f *forwarding) forward(ctx context.Context, conn *net.TCPConn, remote int32) {
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	err := f.c.Forward(ctx, podPath(f.pod.Namespace, f.pod.Name)+"/portforward", remote, conn)
	switch {
	case err == nil || ctx.Err() != nil:
	case client.IsNotFound(err), client.IsInvalid(err): // so will all others
		f.end(fmt.Errorf("no more connections to pod %s: %w", f.pod.Name, err))
	default:
		f.mu.Lock()
		defer f.mu.Unlock()
		f.a.notef("Error: port %d: %v\n", remote, err)
	}
}
