package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

const revisionAnnotation = "deployment.kubernetes.io/revision"

func (a *app) rolloutCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "rollout",
		Short: "Watch, undo, pause, resume or restart the rollout of a Deployment, DaemonSet or StatefulSet",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	sub := func(use, short string, run func(context.Context, *client.Client, string) error, sets func(context.Context, *rolledSet) error) *cobra.Command {
		s := &cobra.Command{Use: use + " deploy/NAME", Short: short, Example: "  dunlin rollout " + use + " deploy/hello", Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeDeployments, RunE: func(cmd *cobra.Command, args []string) error {
			cl, t, err := a.oneTarget(cmd.Context(), args)
			if err != nil {
				return err
			}
			if progress := rolledSets[t.res.GVK.Kind]; progress != nil && sets != nil {
				return sets(cmd.Context(), &rolledSet{a: a, c: cl, res: t.res, name: t.names[0], progress: progress})
			}
			if t.res.GVK.Kind != "Deployment" {
				return usagef("rollout %s works on Deployments, not on %s", use, t.res.Name)
			}
			return run(cmd.Context(), cl, t.names[0])
		}}
		c.AddCommand(a.namespaced(s))
		return s
	}
	var timeout time.Duration
	st := sub("status", "Wait until the rollout is complete, and say what it waits for", func(ctx context.Context, cl *client.Client, name string) error {
		if timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timeout)
			defer cancel()
		}
		return a.rolloutStatus(ctx, cl, name)
	}, func(ctx context.Context, s *rolledSet) error {
		if timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timeout)
			defer cancel()
		}
		return s.status(ctx)
	})
	st.Flags().DurationVar(&timeout, "timeout", 0, "give up after this (0: never)")
	sub("history", "List the revisions", a.rolloutHistory, func(ctx context.Context, s *rolledSet) error { return s.history(ctx) })
	var to int64
	un := sub("undo", "Go back to the revision before, or to --to-revision", func(ctx context.Context, cl *client.Client, name string) error {
		return a.rolloutUndo(ctx, cl, name, to)
	}, func(ctx context.Context, s *rolledSet) error { return s.undo(ctx, to) })
	un.Flags().Int64Var(&to, "to-revision", 0, "revision to go back to (0: the one before)")
	sub("pause", "Hold the rollout", func(ctx context.Context, cl *client.Client, name string) error {
		return a.patchDeployment(ctx, cl, name, map[string]any{"spec": map[string]any{"paused": true}}, "paused")
	}, nil)
	sub("resume", "Go on with a paused rollout", func(ctx context.Context, cl *client.Client, name string) error {
		return a.patchDeployment(ctx, cl, name, map[string]any{"spec": map[string]any{"paused": nil}}, "resumed")
	}, nil)
	sub("restart", "Replace all pods, one by one", func(ctx context.Context, cl *client.Client, name string) error {
		stamp := map[string]any{"kubectl.kubernetes.io/restartedAt": time.Now().UTC().Format(time.RFC3339)}
		return a.patchDeployment(ctx, cl, name, map[string]any{"spec": map[string]any{"template": map[string]any{"metadata": map[string]any{"annotations": stamp}}}}, "restarted")
	}, func(ctx context.Context, s *rolledSet) error { return s.restart(ctx) })
	return c
}

func deploymentPath(namespace, name string) string {
	return "/apis/apps/v1/namespaces/" + url.PathEscape(namespace) + "/deployments/" + url.PathEscape(name)
}

func (a *app) patchDeployment(ctx context.Context, c *client.Client, name string, patch any, done string) error {
	b, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	r := client.Request{Method: http.MethodPatch, Path: deploymentPath(c.Namespace, name), ContentType: "application/strategic-merge-patch+json", Body: b}
	if err := c.JSON(ctx, r, nil); err != nil {
		return err
	}
	a.printf("deployment.apps/%s %s\n", name, done)
	return nil
}

// rolloutProgress says in one line where the rollout is (the rules of
// kubectl rollout status).
func rolloutProgress(d *appsv1.Deployment) (message string, done bool, err error) {
	want := int32(1)
	if d.Spec.Replicas != nil {
		want = *d.Spec.Replicas
	}
	s := d.Status
	if d.Generation > s.ObservedGeneration {
		return "Waiting for the controller to see the new specification...", false, nil
	}
	for _, c := range s.Conditions {
		if c.Type == "RolledBack" && c.Status == corev1.ConditionTrue {
			return "", false, fmt.Errorf("deployment %q was rolled back: %s", d.Name, c.Message)
		}
		if c.Type == appsv1.DeploymentProgressing && strings.Contains(c.Message, " was given up: ") {
			return "", false, fmt.Errorf("deployment %q is being rolled back: %s", d.Name, c.Message)
		}
		if c.Type == appsv1.DeploymentProgressing && c.Reason == "ProgressDeadlineExceeded" {
			hint := fmt.Sprintf("'dunlin describe deploy/%s' says what is wrong", d.Name)
			if s.Replicas > s.UpdatedReplicas {
				hint = fmt.Sprintf("the old pods keep serving; 'dunlin rollout undo deploy/%s' goes back", d.Name)
			}
			return "", false, fmt.Errorf("deployment %q exceeded its progress deadline: %s (%s)", d.Name, c.Message, hint)
		}
		if c.Type == appsv1.DeploymentProgressing && c.Reason == "NewReplicaSetWatched" {
			return "Waiting: " + c.Message, false, nil // with automatic rollback
		}
	}
	switch {
	case s.UpdatedReplicas < want:
		return fmt.Sprintf("Waiting: %d of %d new pods have been created...", s.UpdatedReplicas, want), false, nil
	case s.Replicas > s.UpdatedReplicas:
		return fmt.Sprintf("Waiting: %d old pods are still to end...", s.Replicas-s.UpdatedReplicas), false, nil
	case s.AvailableReplicas < s.UpdatedReplicas:
		return fmt.Sprintf("Waiting: %d of %d updated pods are available...", s.AvailableReplicas, s.UpdatedReplicas), false, nil
	}
	return fmt.Sprintf("deployment %q successfully rolled out", d.Name), true, nil
}

func (a *app) rolloutStatus(ctx context.Context, c *client.Client, name string) error {
	w := &waited{
		a: a, c: c, what: "deployment", name: name, path: deploymentPath(c.Namespace, name),
		list: "/apis/apps/v1/namespaces/" + url.PathEscape(c.Namespace) + "/deployments",
		progress: func(raw []byte) (string, bool, error) {
			var d appsv1.Deployment
			if err := json.Unmarshal(raw, &d); err != nil {
				return "", false, fmt.Errorf("read Deployment: %w", err)
			}
			return rolloutProgress(&d)
		},
	}
	return w.wait(ctx)
}

// revisions lists the Deployment's ReplicaSets by revision.
func (a *app) revisions(ctx context.Context, c *client.Client, name string) (*appsv1.Deployment, map[int64]*appsv1.ReplicaSet, []int64, error) {
	var d appsv1.Deployment
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: deploymentPath(c.Namespace, name)}, &d); err != nil {
		return nil, nil, nil, err
	}
	q := url.Values{"labelSelector": {metav1.FormatLabelSelector(d.Spec.Selector)}}
	var l appsv1.ReplicaSetList
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: "/apis/apps/v1/namespaces/" + url.PathEscape(c.Namespace) + "/replicasets", Query: q}, &l); err != nil {
		return nil, nil, nil, err
	}
	sets := map[int64]*appsv1.ReplicaSet{}
	var order []int64
	for i := range l.Items {
		rs := &l.Items[i]
		rev, err := strconv.ParseInt(rs.Annotations[revisionAnnotation], 10, 64)
		if err != nil || !metav1.IsControlledBy(rs, &d) {
			continue
		}
		sets[rev] = rs
		order = append(order, rev)
	}
	sort.Slice(order, func(i, j int) bool { return order[i] < order[j] })
	return &d, sets, order, nil
}

func (a *app) rolloutHistory(ctx context.Context, c *client.Client, name string) error {
	_, sets, order, err := a.revisions(ctx, c, name)
	if err != nil {
		return err
	}
	a.printf("%-10s%-10s%s\n", "REVISION", "PODS", "IMAGES")
	for _, r := range order {
		images := ""
		for i, ct := range sets[r].Spec.Template.Spec.Containers {
			if i > 0 {
				images += ","
			}
			images += ct.Image
		}
		a.printf("%-10d%-10d%s\n", r, sets[r].Status.Replicas, images)
	}
	return nil
}

func (a *app) rolloutUndo(ctx context.Context, c *client.Client, name string, to int64) error {
	d, sets, order, err := a.revisions(ctx, c, name)
	if err != nil {
		return err
	}
	if d.Spec.Paused {
		return fmt.Errorf("deployment %q is paused; 'dunlin rollout resume deploy/%s' first", name, name)
	}
	if to == 0 {
		if len(order) < 2 {
			return fmt.Errorf("deployment %q has no revision before the present one", name)
		}
		to = order[len(order)-2]
	}
	rs, ok := sets[to]
	if !ok {
		return fmt.Errorf("deployment %q has no revision %d (there are %v)", name, to, order)
	}
	template := rs.Spec.Template.DeepCopy()
	delete(template.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	b, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/resourceVersion", "value": d.ResourceVersion},
		{"op": "replace", "path": "/spec/template", "value": template},
	})
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	r := client.Request{Method: http.MethodPatch, Path: deploymentPath(c.Namespace, name), ContentType: "application/json-patch+json", Body: b}
	if err := c.JSON(ctx, r, nil); err != nil {
		return err
	}
	a.printf("deployment.apps/%s rolled back to revision %d\n", name, to)
	return nil
}
