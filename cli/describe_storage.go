package cli

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/manifests"
)

func modesText(modes []corev1.PersistentVolumeAccessMode) string {
	out := make([]string, len(modes))
	for i, m := range modes {
		out[i] = string(m)
	}
	return strings.Join(out, ", ")
}

func orNone(s string) string {
	if s == "" {
		return "<none>"
	}
	return s
}

func (a *app) describeClaim(ctx context.Context, c *client.Client, u *unstructured.Unstructured) error {
	var claim corev1.PersistentVolumeClaim
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &claim); err != nil {
		return fmt.Errorf("read claim: %w", err)
	}
	asks, has := claim.Spec.Resources.Requests[corev1.ResourceStorage], claim.Status.Capacity[corev1.ResourceStorage]
	a.field("Status", "%s", claim.Status.Phase)
	a.field("StorageClass", "%s", orNone(manifests.ClaimClass(&claim)))
	a.field("Volume", "%s", orNone(claim.Spec.VolumeName))
	a.field("Asks for", "%s, %s", asks.String(), modesText(claim.Spec.AccessModes))
	if claim.Spec.VolumeName != "" {
		a.field("Capacity", "%s, %s", has.String(), modesText(claim.Status.AccessModes))
	}
	switch {
	case claim.Spec.VolumeName != "":
		a.whereIs(ctx, c, claim.Spec.VolumeName)
	case claim.Annotations[manifests.AnnotationSelectedNode] != "":
		a.field("Node", "%s (chosen for its first pod)", claim.Annotations[manifests.AnnotationSelectedNode])
	}
	return a.usedBy(ctx, c, claim.Namespace, claim.Name)
}

// whereIs tells the node of a claim's volume, and what keeps its pods away.
func (a *app) whereIs(ctx context.Context, c *client.Client, name string) {
	u, err := c.Object(ctx, "/api/v1/persistentvolumes/"+url.PathEscape(name))
	if client.IsNotFound(err) {
		a.field("Why", "volume %s no longer exists: its data cannot be found by this claim any more", name)
		a.field("Next", "delete the claim and make it anew, or bring the volume back from a backup")
	}
	var v corev1.PersistentVolume
	if err == nil && runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &v) == nil {
		a.nodeOf(ctx, c, &v)
	}
}

func (a *app) nodeOf(ctx context.Context, c *client.Client, v *corev1.PersistentVolume) {
	node := manifests.LocalVolumeNode(v)
	if node == "" {
		return
	}
	n, err := c.Object(ctx, "/api/v1/nodes/"+url.PathEscape(node))
	switch {
	case client.IsNotFound(err):
		a.field("Node", "%s, which no longer exists", node)
		a.field("Next", "the data is on that machine's disk: join it again under this name with its identity, or delete the claim to give the data up")
		return
	case err != nil:
		a.field("Node", "%s", node)
		return
	}
	has, _, _ := unstructured.NestedString(n.Object, "spec", "providerID")
	if want := v.Annotations[manifests.AnnotationMachine]; want != "" && has != "" && want != has {
		a.field("Node", "%s, but an earlier machine of that name", node)
		a.field("Next", "the data is on that machine's disk, which the one that has the name now does not have: delete the claim to give the data up")
		return
	}
	claim := "CLAIM"
	if r := v.Spec.ClaimRef; r != nil {
		claim = r.Name
	}
	var known corev1.Node
	if runtime.DefaultUnstructuredConverter.FromUnstructured(n.Object, &known) == nil {
		if where, next := lostNode(&known, claim); where != "" {
			a.field("Node", "%s, %s", node, where)
			a.field("Next", "%s", next)
			return
		}
	}
	cond := condition(n, "Ready")
	if cond["status"] == "True" {
		a.field("Node", "%s", node)
		return
	}
	a.field("Node", "%s, which is %v since %v", node, notReady(cond["status"]), cond["lastTransitionTime"])
	a.field("Next", "%s", awayNext(node, startEmpty(claim, "")))
}

// notReady names a node's state by its condition Ready.
func notReady(status any) string {
	if status == "False" {
		return "NotReady"
	}
	return "Unknown"
}

// usedBy lists the pods that mount a claim.
func (a *app) usedBy(ctx context.Context, c *client.Client, namespace, claim string) error {
	var l corev1.PodList
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: "/api/v1/namespaces/" + url.PathEscape(namespace) + "/pods"}, &l); err != nil {
		return err
	}
	var names []string
	for i := range l.Items {
		if slices.ContainsFunc(manifests.ClaimsOf(&l.Items[i]), func(u manifests.ClaimUse) bool { return u.Claim == claim }) {
			names = append(names, l.Items[i].Name)
		}
	}
	a.field("Used by", "%s", orNone(strings.Join(names, ", ")))
	return nil
}

func (a *app) describeVolume(ctx context.Context, c *client.Client, u *unstructured.Unstructured) error {
	var v corev1.PersistentVolume
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &v); err != nil {
		return fmt.Errorf("read volume: %w", err)
	}
	size, claim := v.Spec.Capacity[corev1.ResourceStorage], ""
	if r := v.Spec.ClaimRef; r != nil {
		claim = r.Namespace + "/" + r.Name
	}
	a.field("Status", "%s", v.Status.Phase)
	if v.Status.Message != "" {
		a.field("Message", "%s", v.Status.Message)
	}
	a.field("StorageClass", "%s", orNone(manifests.VolumeClass(&v)))
	a.field("Claim", "%s", orNone(claim))
	a.field("Capacity", "%s, %s", size.String(), modesText(v.Spec.AccessModes))
	a.field("Reclaim policy", "%s", v.Spec.PersistentVolumeReclaimPolicy)
	switch {
	case v.Spec.Local != nil:
		a.field("Source", "local %s", v.Spec.Local.Path)
	case v.Spec.HostPath != nil:
		a.field("Source", "hostPath %s", v.Spec.HostPath.Path)
	}
	a.nodeOf(ctx, c, &v)
	return nil
}
