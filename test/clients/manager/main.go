// Command manager is a controller-runtime manager with leader election: it
// keeps a ConfigMap "NAME-copy" for every ConfigMap labelled copy=me, while
// the server restarts under it, and checks at the end that all copies are
// right and that it was elected.
package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	length := flag.Duration("for", time.Minute, "how long to run")
	flag.Parse()
	log.SetLogger(zap.New(zap.WriteTo(os.Stderr)))
	if err := run(os.Getenv("KUBECONFIG"), *length); err != nil {
		fmt.Fprintln(os.Stderr, "manager:", err)
		os.Exit(1)
	}
}

type copier struct{ client.Client }

func (c copier) Reconcile(ctx context.Context, r ctrl.Request) (ctrl.Result, error) {
	var src corev1.ConfigMap
	if err := c.Get(ctx, r.NamespacedName, &src); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if src.Labels["copy"] != "me" {
		return ctrl.Result{}, nil
	}
	dst := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: src.Namespace, Name: src.Name + "-copy"}}
	_, err := controllerutil.CreateOrUpdate(ctx, c.Client, dst, func() error {
		dst.Data = maps.Clone(src.Data)
		return controllerutil.SetControllerReference(&src, dst, c.Scheme())
	})
	return ctrl.Result{}, err
}

func run(kubeconfig string, length time.Duration) error {
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	lease, renew, retry := 60*time.Second, 50*time.Second, 2*time.Second
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		LeaderElection: true, LeaderElectionID: "copier", LeaderElectionNamespace: "default",
		LeaderElectionReleaseOnCancel: true, LeaseDuration: &lease, RenewDeadline: &renew, RetryPeriod: &retry,
		Metrics: metricsserver.Options{BindAddress: "0"},
	})
	if err != nil {
		return err
	}
	if err := ctrl.NewControllerManagedBy(mgr).For(&corev1.ConfigMap{}).Owns(&corev1.ConfigMap{}).Complete(copier{mgr.GetClient()}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), length+time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	select {
	case <-mgr.Elected():
	case err := <-done:
		return fmt.Errorf("ended before it was elected: %w", err)
	}
	fmt.Println("elected")
	err = work(ctx, mgr.GetAPIReader(), mgr.GetClient(), length)
	cancel()
	if stopErr := <-done; err == nil {
		err = stopErr
	}
	return err
}

func work(ctx context.Context, read client.Reader, c client.Client, length time.Duration) error {
	end := time.Now().Add(length)
	t := time.NewTicker(500 * time.Millisecond)
	defer t.Stop()
	n := 0
	for time.Now().Before(end) {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("manager-%d", n), Labels: map[string]string{"copy": "me"}}, Data: map[string]string{"n": fmt.Sprint(n)}}
		if err := c.Create(ctx, cm); err == nil || apierrors.IsAlreadyExists(err) {
			n++
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
	last := fmt.Errorf("nothing was created")
	for range 60 {
		if last = check(ctx, read, n); last == nil {
			fmt.Printf("%d copies are right\n", n)
			return nil
		}
		select {
		case <-ctx.Done():
			return last
		case <-t.C:
		}
	}
	return last
}

func check(ctx context.Context, read client.Reader, n int) error {
	if n == 0 {
		return fmt.Errorf("nothing was created")
	}
	for i := range n {
		var cm corev1.ConfigMap
		if err := read.Get(ctx, client.ObjectKey{Namespace: "default", Name: fmt.Sprintf("manager-%d-copy", i)}, &cm); err != nil {
			return err
		}
		if cm.Data["n"] != fmt.Sprint(i) {
			return fmt.Errorf("copy %d holds %q", i, cm.Data["n"])
		}
	}
	return nil
}
