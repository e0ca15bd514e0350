package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

// api asks the server; in an emulated guest that is far cheaper than a
// command a question.
type api struct{ c *client.Client }

func newAPI(kubeconfig string) (*api, error) {
	c, err := client.New(kubeconfig, "vm")
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	return &api{c}, nil
}

func (a *api) get(ctx context.Context, path string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return a.c.JSON(ctx, client.Request{Method: http.MethodGet, Path: path}, out)
}

func (a *api) node(ctx context.Context) (*corev1.Node, error) {
	n := &corev1.Node{}
	return n, a.get(ctx, "/api/v1/nodes/vm", n)
}

func (a *api) pod(ctx context.Context, name string) (*corev1.Pod, error) {
	p := &corev1.Pod{}
	return p, a.get(ctx, "/api/v1/namespaces/default/pods/"+name, p)
}

// condition waits for a condition of the node.
func (g *guest) condition(want corev1.NodeConditionType, status corev1.ConditionStatus) (cond corev1.NodeCondition, err error) {
	err = g.until(fmt.Sprintf("node condition %s=%s", want, status), func() error {
		n, err := g.api.node(g.ctx)
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == want && c.Status == status {
				cond = c
				return nil
			}
		}
		return fmt.Errorf("conditions: %+v", n.Status.Conditions)
	})
	return cond, err
}

// ready waits for a pod to be Ready.
func (g *guest) ready(name string) (pod *corev1.Pod, err error) {
	err = g.until("pod "+name+" is Ready", func() error {
		if pod, err = g.api.pod(g.ctx, name); err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("status: %+v", pod.Status)
	})
	return pod, err
}

// ended waits for the one container of a pod that restarts nothing.
func (g *guest) ended(name string) (end *corev1.ContainerStateTerminated, err error) {
	err = g.until("the container of pod "+name+" has ended", func() error {
		p, err := g.api.pod(g.ctx, name)
		if err != nil {
			return err
		}
		for _, s := range p.Status.ContainerStatuses {
			if end = s.State.Terminated; end != nil {
				return nil
			}
		}
		return fmt.Errorf("status: %+v", p.Status)
	})
	return end, err
}

// pod is the manifest of a pod with one container, named as its module.
func pod(name, module, resources string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  runtimeClassName: wasm
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  containers:
  - {name: main, image: %s.wasm, resources: {%s}}
`, name, module, resources)
}
